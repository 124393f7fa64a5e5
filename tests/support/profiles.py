"""Records of a run's steps, written as `megapar.observe.profiler` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

from megapar.pipeline.actions import Event


def write_profile(run_dir: Path, events: Sequence[Event]) -> None:
    """A profile of one step of a pipeline, in which ranks did nothing but `events`."""
    folder = run_dir / "profile"
    folder.mkdir()
    ranks = range(1 + max(event.rank for event in events))
    for rank in ranks:
        header = {
            "start": "start",
            "rank": rank,
            "world": len(ranks),
            "pipeline_rank": rank,
            "device": "none",
            "boot": "",
            "axes": {"pp": {"ranks": list(ranks), "transport": "shared memory"}},
            "meetings": [[0.0, 0.0]],
        }
        spans = [
            [event.action.kind, "", event.action.stage, event.action.microbatch, 0, event.start, event.end]
            for event in sorted(events, key=lambda event: event.start)
            if event.rank == rank
        ]
        step = {
            "step": 1,
            "start": min(event.start for event in events),
            "end": max(event.end for event in events),
            "spans": spans,
            "operations": [],
        }
        lines = [json.dumps(header), json.dumps(step), ""]
        (folder / f"rank_{rank:05}.jsonl").write_text("\n".join(lines))
