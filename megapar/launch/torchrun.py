"""torchrun with exit codes: python -m megapar.launch.torchrun [torchrun's flags] SCRIPT [flags].

torchrun itself ends with 1, whatever a rank ended with. A scheduler decides by the exit code whether to start a job
again: after 75 (asked to stop, and saved) it should, after 2 (options that cannot run) it should not. So this program
ends with the code of the rank that failed first on its node. A rank that a signal has killed counts as lost (6).

With --kubeflow as the first word, codes of ends that another start may mend get 128 more: a PyTorchJob with
`restartPolicy: ExitCode` starts again from 128 on.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from megapar.base.errors import CheckpointError, CommunicationError, MegaparError, Preempted, Rewind

MAY_PASS = (
    CheckpointError.exit_code,
    CommunicationError.exit_code,
    MegaparError.exit_code,
    Preempted.exit_code,
    Rewind.exit_code,
)
"""Another start may end better: it resumes, meets other ranks, takes another checkpoint, or goes back before a spike
(docs/restarts.md)."""
_SIGNAL = 128


def main(words: list[str]) -> int:
    """Run torchrun with `words`; returns the exit code."""
    for_kubeflow = words[:1] == ["--kubeflow"]
    code = 0
    try:
        run.main(words[for_kubeflow:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(error, file=sys.stderr)
        code = failure.exitcode if failure.exitcode > 0 else CommunicationError.exit_code
    except SignalException as error:
        code = _SIGNAL + error.sigval
    except RendezvousError as error:
        print(f"CommunicationError: torchrun's agents did not meet: {error}", file=sys.stderr)
        code = CommunicationError.exit_code
    if for_kubeflow and code in MAY_PASS:
        code += _SIGNAL
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
