"""Weights handed over from ranks are those of an export, in every layout."""

import json
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.giving import Giver, Taker
from megapar_models.convert.handoff import Handoff, StreamLoader, give, plan_buckets, write_safetensors
from megapar_models.convert.safetensors_folder import SINGLE
from megapar_models.convert.saved import load_model
from torch import Tensor
from torch.profiler import profile

from megapar.base.errors import CommunicationError, ConfigError
from megapar.config.options import AdapterConfig
from megapar.declare.params import spec_of
from megapar.launch.grid import grid_of
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.saver import Saver
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SAMPLES,
    STRADDLING,
    Layout,
    make_state,
    micro_batches,
    name,
)
from tests.support.hugging_face import tensors
from tests.support.model_types import TYPES
from tests.support.published import published_model
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import NativeToHf, native_to_hf

# As Hugging Face's qwen3 has them.
QWEN3 = replace(LLAMA, attention_bias=False)
QWEN3_ONE_KV_HEAD = replace(ONE_KV_HEAD, attention_bias=False)
BUCKET_BYTES = 20_000  # smaller than some tensors, larger than most


def published(kind: str) -> Any:
    return published_model(TYPES[kind].model_type, TYPES[kind].fields)


def trained(layout: Layout, precision: str = "fp32") -> TrainState:
    """A state after one step, so biases of routers and copies of tied weights have moved."""
    layout = replace(layout, micro_batch_size=SAMPLES // layout.dp // 2 or 1)
    state = make_state(layout.config(precision))
    train_step(state, micro_batches(state.config, state.ctx, 0))
    return state


def handoff_of(state: TrainState, **options: Any) -> Handoff:
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    slices = state.optimizer.slices()
    return Handoff(
        state.config, grid_of(state.config), state.ctx, state.stages.values(), state.weights, slices, **options
    )


def save(state: TrainState, folder: Path) -> None:
    with Saver(state, folder) as saver:
        saver.save(state)


def hand_over_and_save(layout: Layout, precision: str, folder: Path) -> int:
    state = trained(layout, precision)
    last = state.ctx.world.size - 1
    handoff = handoff_of(state, receivers=(last,))
    target = folder / "handed"
    target.mkdir(exist_ok=True)
    write_safetensors(handoff, target)
    if layout.zero_stage == 3 and not layout.trainable:  # what was gathered is freed
        assert not any(
            param.untyped_storage().nbytes() for stage in state.stages.values() for param in stage.parameters()
        )
    save(state, folder)
    train_step(state, micro_batches(state.config, state.ctx, 1))
    return len(handoff.buckets)


LAYOUTS = [
    Layout(STRADDLING, tp=4, sequence_parallel=True),
    Layout(GPT, tp=2, pp=2),
    Layout(published("deepseek_v3"), tp=2, dp=2, ep=2, etp=1, zero_stage=3),
    Layout(published("gpt_oss"), dp=2, pp=2, ep=2, zero_stage=2),
    Layout(published("gpt_neox"), tp=2, pp=2),
    Layout(QWEN3),
    Layout(QWEN3, tp=2, pp=2, vpp=2, schedule="interleaved", sequence_parallel=True),
    Layout(QWEN3, cp=2, dp=2, zero_stage=3),
    Layout(QWEN3, dp=4, zero_stage=3, shard_ranks=2),
    Layout(QWEN3, dp=2, zero_stage=0, trainable=("layers.1.*",)),
    Layout(QWEN3, dp=2, zero_stage=3, trainable=("layers.1.*",)),
    Layout(QWEN3_ONE_KV_HEAD, tp=4),
    Layout(QWEN3_ONE_KV_HEAD, tp=2, pp=2, zero_stage=3),
    Layout(GPT, pp=2, vpp=2, schedule="zb-v", dp=2),
    Layout(GPT, tp=2, dp=2, zero_stage=3, order="dp-tp-cp-pp"),
    Layout(MIXTRAL, tp=2, ep=2, etp=1),
    Layout(MIXTRAL, tp=2, etp=2),
    Layout(MIXTRAL, dp=4, ep=4),
    Layout(MIXTRAL, dp=2, ep=2, cp=2, zero_stage=3),
    Layout(published("deepseek_v3"), tp=2, pp=2),
    Layout(published("gpt_oss"), tp=2, dp=2, ep=2, etp=2, zero_stage=1),
    Layout(published("glm4_moe"), tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(published("cohere"), tp=2),
    Layout(published("stablelm, norms"), tp=4),
    # Parts of its tables of all layers are on several stages.
    Layout(published("gemma4_text"), tp=2, pp=2),
    Layout(published("gemma4_text, all"), pp=2, dp=2, ep=2, zero_stage=3),
]


@pytest.mark.parametrize("precision", slow_but([0], ["fp32", "bf16"]))
@pytest.mark.parametrize("layout", slow_but([0, 3], LAYOUTS), ids=name)
def test_a_file_of_the_stream_is_byte_for_byte_that_of_an_export(
    layout: Layout, precision: str, tmp_path: Path
) -> None:
    (buckets, *others) = run_ranks(layout.world, hand_over_and_save, layout, precision, tmp_path)
    assert buckets > 3
    assert set(others) <= {buckets}
    native_to_hf(NativeToHf(tmp_path / "checkpoints/step_00000001", tmp_path / "exported", verify=False))
    assert (tmp_path / "handed" / SINGLE).read_bytes() == (tmp_path / "exported" / SINGLE).read_bytes()


ROUTERS = [
    Layout(published("ernie4_5_moe"), dp=4, ep=2, zero_stage=3, shard_ranks=2),
    Layout(published("ernie4_5_moe"), dp=2, ep=2, zero_stage=0),
    Layout(published("minimax_m2"), dp=2, tp=2, ep=2, etp=1, zero_stage=1),
    Layout(published("minimax_m2"), dp=2, pp=2, trainable=("layers.1.*",)),
]


@pytest.mark.parametrize("layout", slow_but([0], ROUTERS), ids=name)
def test_routers_that_a_bf16_file_has_in_fp32_are_handed_over_unrounded(layout: Layout, tmp_path: Path) -> None:
    test_a_file_of_the_stream_is_byte_for_byte_that_of_an_export(layout, "bf16", tmp_path)


# Other receivers


def all_of(handoff: Handoff) -> dict[str, Tensor]:
    """The whole stream, copied."""
    return {name: tensor.clone() for bucket in handoff.stream() for name, tensor in bucket.items()}


def stream_to_a_group(layout: Layout, folder: Path) -> dict[str, Tensor]:
    state = trained(layout)
    save(state, folder)
    handoff = handoff_of(state, receivers=(0, 2))
    first = all_of(handoff)
    second = all_of(handoff)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


def test_each_rank_of_a_group_receives_what_an_export_holds_and_a_model_takes_it_over(tmp_path: Path) -> None:
    """A tied head; a generator with the tensors of the stream computes what the checkpoint's model does."""
    layout = Layout(GPT, tp=2, pp=2)
    streams = run_ranks(4, stream_to_a_group, layout, tmp_path)
    native_to_hf(NativeToHf(tmp_path / "checkpoints/step_00000001", tmp_path / "exported", verify=False))
    expected = tensors(tmp_path / "exported")
    assert [len(stream) for stream in streams] == [len(expected), 0, len(expected), 0]
    for stream in (streams[0], streams[2]):
        assert stream.keys() == expected.keys()
        assert all(torch.equal(stream[key], expected[key]) for key in expected)
    _, stage = load_model(tmp_path / "checkpoints/step_00000001")
    weights = {key: param.clone() for key, param in stage.named_parameters()}
    with torch.no_grad():
        for param in stage.parameters():
            param.view(-1)[: sum(piece.held.numel for piece in spec_of(param).pieces)] = 7.0
    StreamLoader(stage).load(streams[0])
    assert all(torch.equal(param, weights[key]) for key, param in stage.named_parameters())


def test_a_model_takes_over_its_stream() -> None:
    """Biases that select experts, rotary pairs beside each other, and stacks of experts; and norms of each head."""
    for kind in ("deepseek_v3", "gpt_oss", "stablelm, norms", "gemma4_text"):
        state = trained(Layout(published(kind)))
        other = make_state(state.config)
        loader = StreamLoader(next(iter(other.stages.values())))  # type: ignore[arg-type]
        for bucket in handoff_of(state).stream():
            loader.load(bucket)
        for ours, theirs in zip(tensors_of(state), tensors_of(other), strict=True):
            assert torch.equal(ours, theirs)


def tensors_of(state: TrainState) -> list[Tensor]:
    (stage,) = state.stages.values()
    buffers = [x for x in stage.buffers() if hasattr(x, "spec") and not spec_of(x).training_state]
    return [*stage.parameters(), *buffers]


# Another process


def take(taker: Taker, folder: Path, buckets: int) -> None:
    """Take streams, and save all tensors of each. It dies after so many buckets."""
    for number, stream in enumerate(taker.streams()):
        found = {}
        for bucket in stream:
            found |= {name: tensor.clone() for name, tensor in bucket.items()}
            buckets -= 1
            if not buckets:
                os._exit(0)
        torch.save(found, folder / f"taken_{number}.pt")


@contextmanager
def taking(folder: Path, buckets: int = 0) -> Iterator[Path]:
    """A process that takes weights, by its path. It ends when the giver leaves."""
    with Taker(folder, 20.0) as taker:
        process = multiprocessing.get_context("fork").Process(target=take, args=(taker, folder, buckets))
        process.start()
        yield taker.path
        process.join(20)
        process.kill()
        assert process.exitcode == 0


def give_twice(layout: Layout, path: Path, precision: str) -> dict[str, Tensor]:
    state = trained(layout, precision)
    handoff = handoff_of(state)
    if not handoff.receives:
        give(handoff, None)
        give(handoff, None)
        return all_of(handoff)
    with Giver(path, 20.0) as giver:
        give(handoff, giver)
        give(handoff, giver)
    return all_of(handoff)


def test_another_process_takes_stream_after_stream_through_shared_memory(tmp_path: Path) -> None:
    with taking(tmp_path) as path:
        expected, _ = run_ranks(2, give_twice, Layout(QWEN3, tp=2), path, "bf16")
    for number in range(2):
        found = torch.load(tmp_path / f"taken_{number}.pt")
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def gone_of(action: Callable[[], object]) -> tuple[str, float]:
    """The error of an action, and its seconds."""
    start = time.monotonic()
    try:
        action()
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def give_to_a_mortal(layout: Layout, path: Path) -> tuple[str, float]:
    handoff = handoff_of(trained(layout))
    with Giver(path, 20.0) as giver:
        return gone_of(lambda: give(handoff, giver))


def test_a_receiver_that_is_gone_is_one_line_of_error(tmp_path: Path) -> None:
    with taking(tmp_path, buckets=3) as path:
        words, seconds = give_to_a_mortal(Layout(QWEN3), path)
    assert words.startswith(f"{path}: the process that takes weights has gone after bucket 2")
    assert "\n" not in words
    assert seconds < 10


def test_a_receiver_that_does_not_answer_ends_the_wait(tmp_path: Path) -> None:
    with Taker(tmp_path, 20.0) as taker, Giver(taker.path, 0.2) as giver:
        memory = giver.memory(4).view(torch.float32)
        with pytest.raises(CommunicationError, match=r"has not answered after bucket 0 for 0.2 s"):
            giver.give({"x": memory})


def test_a_giver_that_is_gone_is_told(tmp_path: Path) -> None:
    with Taker(tmp_path, 20.0) as taker:
        giver = Giver(taker.path, 20.0)
        give_one = Thread(target=gone_of, args=(lambda: giver.give({"x": giver.memory(4).view(torch.float32)}),))
        give_one.start()
        streams = taker.streams()
        stream = next(streams)
        next(stream)
        giver._connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(CommunicationError, match=r"the process that gives weights has gone after bucket 1"):
            next(stream)
        give_one.join()


def hello(connection: socket.socket, text: bytes = b"") -> None:
    """Begin as a giver does, with memory that holds `text` alone."""
    memory = os.memfd_create("test")
    os.write(memory, text)
    socket.send_fds(connection, [b"u"], [memory])
    os.close(memory)


def no_dtype(connection: socket.socket) -> None:
    text = json.dumps([("x", "load", [1], 0)]).encode()
    hello(connection, bytes(4) + text)
    connection.sendall(struct.pack("=QQ", 4, len(text)))


def outside(connection: socket.socket) -> None:
    text = json.dumps([("x", "uint8", [8], -4)]).encode()
    hello(connection, bytes(8) + text)
    connection.sendall(struct.pack("=QQ", 8, len(text)))


NO_GIVERS: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "leaves": (lambda connection: None, "has gone, or passes no memory"),
    "passes no memory": (lambda connection: connection.sendall(b"u"), "has gone, or passes no memory"),
    "says too little": (lambda connection: (hello(connection), connection.sendall(b"x")), "no bucket, after bucket 0"),
    "counts beyond its memory": (
        lambda connection: (hello(connection), connection.sendall(struct.pack("=QQ", 1 << 60, 1 << 60))),
        "bytes in a memory of 0",
    ),
    "no JSON": (
        lambda connection: (hello(connection, b"1234{"), connection.sendall(struct.pack("=QQ", 4, 1))),
        "no bucket, after bucket 0",
    ),
    "no dtype": (no_dtype, "x: load is no dtype"),
    "outside": (outside, "x: bytes -4 to 4 of 8"),
}


@pytest.mark.parametrize("kind", NO_GIVERS)
def test_a_process_that_is_no_giver_is_one_line_of_error(kind: str, tmp_path: Path) -> None:
    speak, said = NO_GIVERS[kind]
    with Taker(tmp_path, 20.0) as taker, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(taker.path / "socket"))
        speak(connection)
        connection.shutdown(socket.SHUT_WR)
        words, _ = gone_of(lambda: [list(stream) for stream in taker.streams()])
    assert words.startswith("the process that gives weights")
    assert said in words
    assert "\n" not in words


def test_a_tensor_that_the_other_end_would_read_otherwise_is_not_given(tmp_path: Path) -> None:
    """Fault view-handed-over: the columns of a transposed view would arrive as rows."""
    with Taker(tmp_path, 20.0) as taker, Giver(taker.path, 20.0) as giver:
        memory = giver.memory(64).view(torch.float32).view(4, 4)
        for wrong, said in (
            (memory.t(), r"x \[4, 4\]: its elements do not follow one another"),
            (memory[:, :2], "do not follow one another"),
            (torch.zeros(4), "does not lie in `memory`"),
            (torch.zeros(4, device="meta"), "does not lie in `memory`"),
        ):
            with pytest.raises(ValueError, match=said):
                giver.give({"x": wrong})


def test_the_folder_of_a_killed_taker_is_swept(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=lambda: (Taker(tmp_path, 20.0), os._exit(9)))
    process.start()
    process.join()
    assert len(list(tmp_path.glob("megapar-taker-*"))) == 1
    with Taker(tmp_path, 20.0) as taker, Taker(tmp_path, 20.0) as other:
        assert set(tmp_path.glob("megapar-taker-*")) == {taker.path, other.path}


def test_nobody_there_is_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody takes weights there"):
        Giver(tmp_path / "nowhere", 1.0)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="no folder of this user, closed to others"):
        Giver(tmp_path, 1.0)


def lose_a_rank(layout: Layout) -> tuple[str, float]:
    state = trained(layout)
    handoff = handoff_of(state)
    stream = handoff.stream()
    next(stream)
    if state.ctx.world.rank == 1:
        os._exit(0)
    found = gone_of(lambda: list(stream))
    Path(f"{os.environ['HANDOFF_FOLDER']}/{state.ctx.world.rank}").write_text(f"{found[1]:.2f} {found[0]}")
    return found


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDOFF_FOLDER", str(tmp_path))
    with pytest.raises(AssertionError):  # a rank has no result
        run_ranks(2, lose_a_rank, Layout(QWEN3, tp=2))
    seconds, _, words = (tmp_path / "0").read_text().partition(" ")
    assert "another rank ended" in words
    assert "\n" not in words
    assert float(seconds) < 10


# Memory and the plan


def peak_of_a_stream(layout: Layout, bucket_bytes: int) -> tuple[int, int, int]:
    """The most bytes that tensors of a stream took at once; those of its largest bucket, and of the largest message."""
    state = trained(layout)
    handoff = handoff_of(state, bucket_bytes=bucket_bytes)
    for _ in handoff.stream():  # what is made once is made
        pass
    with profile(profile_memory=True) as profiler:
        for _ in handoff.stream():
            pass
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # What rank 0 owns stays there.
    messages = [bucket.messages[1][-1].end for bucket in handoff.buckets if 1 in bucket.messages]
    return peak, handoff.most_nbytes, max(messages)


def test_a_receiver_needs_a_bucket_and_a_message() -> None:
    layout = Layout(QWEN3, tp=2)
    whole = 0
    for bucket_bytes in (20_000, 80_000, 10**9):
        receiver, sender = run_ranks(2, peak_of_a_stream, layout, bucket_bytes)
        peak, bucket, message = receiver
        # Beside them rows of one tensor in the order of theirs.
        assert bucket < peak <= bucket + message + 8_000
        assert message <= sender[0] <= message + 8_000
        whole = bucket
    assert whole > 3 * 80_000


def test_weights_that_an_export_has_not_are_refused() -> None:
    config = replace(Layout(QWEN3, tp=2).config(), adapter=AdapterConfig(rank=2))
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.k\.lora_a.* are no part of an export.*adapters"):
        plan_buckets(config, grid_of(config))


def test_every_rank_has_the_same_plan_and_each_box_one_owner() -> None:
    layout = Layout(published("deepseek_v3"), tp=2, pp=2, dp=2, ep=2, etp=2)
    config = layout.config()
    buckets = plan_buckets(config, grid_of(config), BUCKET_BYTES)
    assert buckets == plan_buckets(config, grid_of(config), BUCKET_BYTES)
    assert all(bucket.nbytes <= BUCKET_BYTES or len(bucket.tensors) == 1 for bucket in buckets)
    names = [theirs.name for bucket in buckets for theirs in bucket.tensors]
    assert names == sorted(hf_recipes(config.model))
    for bucket in buckets:
        for theirs in bucket.tensors:
            for part in theirs.recipe.parts:
                count = torch.zeros(part.shape)
                for sent in bucket.messages.values():
                    for item in sent:
                        if item.part == part:
                            count[item.box.slices] += 1
                assert (count == 1).all(), part.name
    assert {owner for bucket in buckets for owner in bucket.messages} > {0, 1}
