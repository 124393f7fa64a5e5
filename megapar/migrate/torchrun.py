"""Flags of torchrun, found in launch scripts of every framework."""

from megapar.migrate.rows import lacking, same

STAYS_TORCHRUNS = "give it to torchrun, before the name of the program"

FLAGS = (
    same("nproc-per-node", "launch.nproc", "or give it to torchrun, as before"),
    lacking("nnodes", STAYS_TORCHRUNS),
    lacking("node-rank", STAYS_TORCHRUNS),
    lacking("master-addr", STAYS_TORCHRUNS),
    lacking("master-port", STAYS_TORCHRUNS),
    lacking("rdzv-backend", STAYS_TORCHRUNS),
    lacking("rdzv-endpoint", STAYS_TORCHRUNS),
)
