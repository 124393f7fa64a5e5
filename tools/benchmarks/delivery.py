"""What delivery costs: from a start to the first batch, memory, and samples a second, for corpora of any size.

Corpora are mock files: .bin files without content (sparse, of zeros) under a whole index, so ten billion samples fit on
any disk. Their documents are as long as may be: the index, 20 bytes a document, is checked on opening, and a last
corpus of many documents shows the cost of this check. Each size is measured in a process of its own.
"""

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.counting import cost, memory
from benchmarks.harness import Found, Output
from megapar.data.blend import BlendPhase
from megapar.data.delivery import Delivery
from megapar.data.indexed import IndexedDataset, IndexedWriter
from megapar.data.loader import Loader, Mixture
from megapar.data.sources import ChunkDataset

LONGEST = 2**31 - 1  # tokens of a document that the format holds


@dataclass(frozen=True)
class Options(Output):
    """Measure delivery on this machine."""

    samples: tuple[int, ...] = (10**6, 10**8, 10**10)
    """Sizes of the corpora, each a blend of three fifths and two fifths of it."""
    seq_length: int = 16
    """Tokens of a sample. Files take 2 bytes a token of address space, and none of the disk."""
    global_batch_size: int = 512
    """Samples a step, all read by one rank."""
    documents: int = 10**7
    """Documents of the corpus that is opened to see what its index costs."""
    steps: int = 50
    """Steps read for the rate."""
    workers: int = 0
    """data.workers: 0 is a thread."""


def mock(prefix: Path, num_tokens: int, document: int = LONGEST) -> Path:
    """A pair of `num_tokens` zeros in documents of `document` tokens."""
    lengths = np.full(-(-num_tokens // document), document, "<i4")
    lengths[-1] = num_tokens - document * (len(lengths) - 1)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.append_index(lengths, np.arange(1, len(lengths) + 1))
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.truncate(2 * num_tokens)
    return prefix


def deliver(prefixes: list[Path], options: Options) -> dict[str, float]:
    """Seconds until the first step is there, memory taken meanwhile, and samples a second after it."""
    found: dict[str, float] = {}

    def read() -> None:
        start = time.perf_counter()
        sources = [ChunkDataset(prefix, options.seq_length, vocab_size=50_000) for prefix in prefixes]
        mixture = Mixture(sources, [BlendPhase(0, (0.7, 0.3)), BlendPhase(10**6, (0.5, 0.5))], seed=1)
        size = options.global_batch_size
        loader = Loader(mixture, batch_size=lambda _: size, micro_batch_size=8, seq_length=options.seq_length)
        for source in sources:
            source.fingerprints()
        delivery = Delivery(loader, options.workers)
        delivery.next_step()
        found["first_batch_seconds"] = time.perf_counter() - start
        for _ in range(options.steps):
            delivery.next_step()
        seconds = time.perf_counter() - start - found["first_batch_seconds"]
        found["samples_per_second"] = options.steps * size / seconds
        delivery.close()

    return found | {"mebibytes": memory(read)[1] / 2**20}


def measure(options: Options) -> Found:
    """Measure each size in a process of its own, then the index of many documents."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in options.samples:
            tokens = [int(count * share) * options.seq_length + 1 for share in (0.6, 0.4)]
            prefixes = [mock(Path(folder) / f"{count}_{i}", n) for i, n in enumerate(tokens)]
            # A process for each size: what one size took is not there for the next.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                rows.append({"samples": count, **pool.submit(deliver, prefixes, options).result()})
        many = mock(Path(folder) / "many", 1000 * options.documents, 1000)
        opening = cost(lambda: IndexedDataset(many))[0].wall
        source = ChunkDataset(many, 4096, vocab_size=50_000)
        ids = np.random.default_rng(0).permutation(len(source))[:64]
        samples = source.read(ids)
        finding = cost(lambda: source.starts(ids, samples))[0].wall
    documents = {"documents": options.documents, "opening_seconds": opening, "starts_of_64_samples_seconds": finding}
    return Found({"delivery": rows, **documents})
