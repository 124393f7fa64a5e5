"""Models by name: ORG/MODEL[@REVISION] in place of a folder of Hugging Face, a TOML file or a tokenizer.json.

Names are tested with a cache made by hand, without a network, and with a server of this host in place of the hub.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import tyro
from megapar_models.convert.by_name import open_description, open_source, open_weights
from megapar_tools.prepare.chat import load_template
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess

from megapar.base.errors import CheckpointError, ConfigError, DataError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.origin import in_words, origin_of
from megapar.data.tokenizer import fetch_tokenizer, load_tokenizer, tokenizer_file
from megapar.system.hub import ModelName
from tests.support import program
from tests.support.hub import COMMIT, NEWER, REPO, Hub, environment, fetch_apart, make_cache, serving
from tests.support.hugging_face import Case, assert_same_tensors, save_model
from tests.support.options import load
from tests.support.tokenizers import hugging_face
from tools import convert_checkpoint, inspect_checkpoint, new_family, plan
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

PINNED = f"{REPO}@{COMMIT}"
FILES = {"config.json": b"{}", "model.safetensors": bytes(1000), "pytorch_model.bin": b"pickle", "run.py": b"code"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face with weights in shards, a tokenizer, a chat template, a pickle, and code."""
    folder = save_model(tmp_path_factory.mktemp("model"), Case("llama", {"vocab_size": 400}), max_shard_size="50KB")
    hugging_face(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "tokenizer_as_it_is.py").write_text("raise SystemError")
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    return folder


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME with `model` in its cache, offline. The working folder is an empty one."""
    make_cache(tmp_path / "home", model)
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    # Here the library has read its variables already, when it was imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


# Names


def test_names_are_those_of_the_hub_and_all_else_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault names-of-models: a path is never sent to the hub, however it is written."""
    monkeypatch.chdir(tmp_path)
    for text in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "01-ai/Yi-6B", "a_b/c.d"):
        assert ModelName.parse(text) == (text, "")
    for revision in ("main", "v1.0", "refs/pr/7", COMMIT):
        assert ModelName.parse(f"a/b@{revision}") == ("a/b", revision)
    paths = ["gpt2", "a/b/c", "../x/y", "../x", "./a/b", "/a/b", "-a/b", "a/-b", "a/b-", ".a/b", "a/..", "a//b", "~/b"]
    paths += [
        "a/b.json",
        "data/mine.toml",
        "a/b.model",
        "a/b.git",
        "a--b/c",
        "a/b..c",
        "a/b c",
        "ä/b",
        "a/b\n",
        "a\\b/c",
    ]
    paths += ["a/b@", "a/b@-x", "a/b@../../x", "a/b@/x", "a/b@x//y", "a/b@x/", "a@b/c", f"a/{'b' * 97}", "hf:a/b", ""]
    assert [text for text in paths if ModelName.parse(text) is not None] == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").symlink_to("nowhere")
    assert ModelName.parse("a/b") is None
    assert ModelName.parse("a/b@main") == ("a/b", "main")


# Conversion


def test_a_model_by_name_is_converted_as_its_folder_and_its_commit_is_pinned(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_to_native(HfToNative(REPO, Path("native"), verify=False))
    hf_to_native(HfToNative(model, Path("other"), verify=False))
    named, plain = (read_manifest(Path(name)) for name in ("native", "other"))
    assert named.weights_digest() == plain.weights_digest()
    assert named.trainer["origin"] == {"repo": REPO, "commit": COMMIT}
    assert "origin" not in plain.trainer
    # No code comes out of the cache, though another program may have put it there.
    assert not Path("native/tokenizer_as_it_is.py").exists()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < {path.name for path in Path("native").iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["inspect", "native", "--compare", "other"])
    assert inspect_checkpoint.main() == 0
    assert f"the weights began as {PINNED} of Hugging Face" in capsys.readouterr().out

    Path("native/config.json").unlink()
    native_to_hf(NativeToHf(Path("native"), Path("back"), like=f"{REPO}@main", verify=False, verify_tokenizer=False))
    assert_same_tensors(Path("back"), model)
    assert json.loads(Path("back/config.json").read_text())["eos_token_id"] == 0
    assert Path("back/chat_template.jinja").read_text() == (model / "chat_template.jinja").read_text()
    assert not Path("back/tokenizer_as_it_is.py").exists()


def test_a_name_on_the_command_line_is_kept_as_it_is_written() -> None:
    """`Path` would make ./a/b of a name, or a name of ./a/b."""
    for text in ("./a/b", "a/b@refs/pr/1"):
        assert tyro.cli(HfToNative, args=[text, "dst"]).src == text
        assert tyro.cli(NativeToHf, args=["src", "dst", "--like", text]).like == text
        assert tyro.cli(new_family.Options, args=[text]).folder == text


def test_a_folder_wins_over_a_model_of_its_name(model: Path, home: Path) -> None:
    Path("Acme").mkdir()
    Path(REPO).symlink_to(model)
    assert open_source(REPO, ["config.json"]) == (Path(REPO), None)
    assert load(["--config", REPO]).sources["model.hidden_size"] == f"{REPO}/config.json"
    assert fetch_tokenizer(f"hf:{REPO}") == f"hf:{REPO}"
    assert tokenizer_file(f"hf:{REPO}") == Path(REPO, "tokenizer.json")
    assert load_tokenizer(f"hf:{REPO}").fingerprint == load_tokenizer(f"hf:{model}/tokenizer.json").fingerprint


def test_an_index_that_names_other_files_is_refused(model: Path, home: Path) -> None:
    snapshot = home / f"hub/models--Acme--tiny/snapshots/{COMMIT}"
    index = snapshot / "model.safetensors.index.json"
    index.unlink()
    for file, said in (
        ("pytorch_model.bin", "which is no safetensors file"),
        ("../x.safetensors", "outside the folder"),
    ):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(CheckpointError, match=said):
            open_weights(REPO)
    index.unlink()
    with pytest.raises(DataError, match=r"has no model\.safetensors: the cache \(.*\) has none, and HF_HUB_OFFLINE is"):
        open_weights(REPO)


def test_a_link_out_of_the_cache_is_not_read(home: Path) -> None:
    """Fault copies-of-private-files: somebody who made the cache may have put a link into it."""
    snapshot = home / f"hub/models--Acme--tiny/snapshots/{COMMIT}"
    (home / "private.json").write_text("{}")
    for file in ("config.json", "tokenizer.json"):
        (snapshot / file).unlink()
        (snapshot / file).symlink_to(home / "private.json")
    for call in (
        lambda: open_description(REPO),
        lambda: load(["--config", REPO]),
        lambda: load_tokenizer(f"hf:{REPO}"),
    ):
        with pytest.raises(DataError, match=r"is a link to .*private\.json, out of the cache of Acme/tiny"):
            call()


def test_large_files_that_models_share_in_the_cache_are_read(model: Path, home: Path) -> None:
    shared = home / "hub/blobs/ab/config"
    shared.parent.mkdir(parents=True)
    shared.write_bytes((model / "config.json").read_bytes())
    file = home / f"hub/models--Acme--tiny/snapshots/{COMMIT}/config.json"
    blob = file.resolve()
    blob.unlink()
    blob.symlink_to(shared)
    hf_to_native(HfToNative(REPO, Path("native"), verify=False))
    assert Path("native/config.json").read_bytes() == shared.read_bytes()


def test_a_family_is_sought_for_a_model_by_name(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["new_family", PINNED])
    new_family.main()
    assert f"megapar convert hf-to-native {PINNED} native" in capsys.readouterr().out


# Configurations


def test_a_model_by_name_configures_a_run(model: Path, home: Path, tmp_path: Path) -> None:
    """As config.toml of its conversion does; so do the folder, its config.json, and `base` of a TOML file."""
    hf_to_native(HfToNative(model, tmp_path / "native", verify=False))
    converted = load(["--config", str(tmp_path / "native/config.toml")]).config.model
    Path("mine.toml").write_text(f'base = "{REPO}@{COMMIT}"\n[train]\nsteps = 7\n')
    for name in (REPO, f"{REPO}@main", str(model), str(model / "config.json"), "mine.toml"):
        found = load(["--config", name, "--model.num_hidden_layers", "3"])
        assert (found.config.model.num_hidden_layers, found.config.model.vocab_size) == (3, 400)
        assert found.config.model.hidden_size == converted.hidden_size
        assert found.config.model.rope_theta == converted.rope_theta
    assert found.config.train.steps == 7
    assert found.sources["model.hidden_size"] == f"{PINNED}/config.json"
    assert load(["--config", str(model)]).sources["model.hidden_size"] == str(model / "config.json")
    sized = plan.with_sizes(load(["--config", REPO]))
    assert sized.model.vocab_size == 400


def test_a_config_json_that_no_family_reads_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "martian"}')
    make_cache(home, tmp_path / "odd", "Acme/odd")
    for name in ("Acme/odd", str(tmp_path / "odd")):
        with pytest.raises(ConfigError, match=r"config\.json: model_type='martian' is not supported"):
            load(["--config", name])
    # A native checkpoint has both files, and config.toml says more.
    (tmp_path / "odd/config.toml").write_text("[train]\nsteps = 3\n")
    with pytest.raises(ConfigError, match="is a folder"):
        load(["--config", str(tmp_path / "odd")])


# Tokenizers


def test_a_tokenizer_by_name_is_read_at_its_commit_and_never_downloaded_for_a_file(model: Path, home: Path) -> None:
    spec = fetch_tokenizer(f"hf:{REPO}")
    assert spec == f"hf:{PINNED}"
    for text in (spec, f"hf:{REPO}"):
        assert load_tokenizer(text).fingerprint == load_tokenizer(f"hf:{model / 'tokenizer.json'}").fingerprint
    assert load_template("", spec).source == "{{ messages[0].content }}"
    with pytest.raises(DataError) as refused:  # as a checkpoint may name it that came from elsewhere
        load_tokenizer(f"hf:Acme/other@{NEWER}")
    assert f"hf download Acme/other tokenizer.json tokenizer_config.json --revision {NEWER}" in str(refused.value)
    with pytest.raises(DataError, match=r"hf:data/tokenizer\.json: .* is not a file"):  # a path, not a name
        load_tokenizer("hf:data/tokenizer.json")
    for untouched in ("bytes", "spm:Acme/tiny", "tiktoken:Acme/tiny", f"hf:{model}/tokenizer.json"):
        assert fetch_tokenizer(untouched) == untouched


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_by_name_alone_keeps_what_it_began_from(ranks: int, home: Path) -> None:
    """From text to a checkpoint. The processes that tokenize, and the ranks, read the same commit."""
    hf_to_native(HfToNative(REPO, Path("native"), verify=False))
    Path("text.txt").write_text("A document of some words. " * 200)
    made = preprocess([Path("text.txt")], Path("text"), PreprocessOptions(tokenizer=f"hf:{REPO}"))
    assert made["tokenizer"]["spec"] == f"hf:{PINNED}"
    flags = ["--config", REPO, "--data.tokenizer", f"hf:{REPO}", "--data.train", "text", "--train.steps", "1"]
    flags += ["--checkpoint.init_from", "native", "--train.global_batch_size", "2", "--train.micro_batch_size", "1"]
    ended = program.run(*flags, "--train.seq_length", "32", "--launch.nproc", str(ranks), cwd=Path.cwd())
    assert ended.code == 0, ended.err
    assert f"started from the weights of native ({PINNED}), step 0" in ended.out
    trainer = read_manifest(Path("run/checkpoints/step_00000001")).trainer
    assert in_words(origin_of(trainer)) == PINNED
    assert trainer["config"]["data.tokenizer"] == f"hf:{PINNED}"
    written = Path("run/config.toml").read_text()
    assert f'tokenizer = "hf:{PINNED}"' in written
    assert f"hidden_size = 48  # {PINNED}/config.json" in written


# Refusals


def test_without_the_library_one_line_names_the_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    config, tokenizer = ["--config", REPO], f"hf:{REPO}"
    for call in (lambda: open_weights(REPO), lambda: load(config), lambda: load_tokenizer(tokenizer)):
        with pytest.raises(ConfigError) as refused:
            call()
        assert "models by name need the package huggingface_hub (extra hub): pip install" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_offline_the_cache_is_used_and_what_it_lacks_is_one_line(home: Path) -> None:
    assert open_description(REPO).origin == {"repo": REPO, "commit": COMMIT}
    for name in ("Acme/absent", f"{REPO}@v2", f"{REPO}@{NEWER}"):
        with pytest.raises(DataError, match=r"lacks files of it, and HF_HUB_OFFLINE is set: unset it once") as refused:
            open_description(name)
        assert str(refused.value).startswith(f"{name}: nothing here has this name")
        assert refused.value.everywhere
    with pytest.raises(DataError, match=rf"^{PINNED}: has no adapter_config\.json: the cache .* HF_HUB_OFFLINE is set"):
        open_source(REPO, ["adapter_config.json"], ["adapter_config.json"])


def test_what_the_hub_refuses_is_one_line_with_an_exit_code(tmp_path: Path) -> None:
    repos = {REPO: {COMMIT: {**FILES, "model.safetensors": bytes(1 << 16)}}, "Acme/gated": {COMMIT: FILES}}
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, {resource.RLIM_INFINITY}))"
    (tmp_path / "file").write_text("")
    with serving(Hub(repos)) as server:
        server.gated.add("Acme/gated")
        env = environment(tmp_path, server.endpoint)
        named = [("Acme/absent", "config.json"), ("Acme/gated", "config.json"), (f"{REPO}@v9", "config.json")]
        found = fetch_apart([*named, (REPO, "tokenizer.json"), (REPO, "model.safetensors")], env, before=limit)
        found += fetch_apart([(REPO, "config.json")], environment(tmp_path / "file", server.endpoint))
    found += fetch_apart([(REPO, "config.json")], environment(tmp_path / "empty", server.endpoint))
    expected = [
        ("ConfigError", 2, "Acme/absent: nothing here has this name, nor a public model at", "`hf auth login`"),
        (
            "ConfigError",
            2,
            "Acme/gated: ",
            "granted access: ask there, then log in by `hf auth login`",
        ),
        ("ConfigError", 2, f"{REPO}@v9: ", f"has {REPO}, and no branch, tag or commit v9 of it"),
        ("DataError", 3, f"{PINNED}: has no tokenizer.json: http", "gives none"),
        ("StorageError", 7, f"{REPO}: cannot be written to ", "(File too large): set HF_HOME to a folder with room"),
        ("StorageError", 7, f"{REPO}: cannot be written to ", "(Not a directory): set HF_HOME to a folder with room"),
        (
            "DataError",
            3,
            f"{REPO}: nothing here has this name, and {server.endpoint} cannot be read (Connect",
            "HF_END",
        ),
    ]
    for (name, code, line), (expected_name, expected_code, begin, within) in zip(found, expected, strict=True):
        assert (name, code) == (expected_name, expected_code), line
        assert line.startswith(begin)
        assert within in line
        assert "\n" not in line


# Downloads


def test_only_files_that_are_asked_for_are_downloaded_and_a_commit_needs_no_network(tmp_path: Path) -> None:
    with serving(Hub({REPO: {COMMIT: FILES, NEWER: {**FILES, "config.json": b"[]"}}})) as server:
        env = environment(tmp_path, server.endpoint)
        ((repo, commit, folder),) = fetch_apart([(REPO, "config.json")], env)
        assert (repo, commit) == (REPO, COMMIT)
        assert server.files_asked_for() == {"config.json"}
        server.branches["main"] = NEWER
        server.requests.clear()
        found = fetch_apart([(PINNED, "config.json"), (REPO, "config.json")], env)
        assert found == [[repo, commit, folder], [repo, NEWER, folder.replace(COMMIT, NEWER)]]
        assert not any(COMMIT in line for line in server.requests)
    # Without a network the branch is where it was seen last.
    assert fetch_apart([(REPO, "config.json")], env)[0][1] == NEWER


@pytest.mark.slow
def test_a_model_is_downloaded_with_a_broken_connection_and_a_branch_that_moves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole conversion, from a server in place of the hub. A second start downloads nothing again."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    (name, weights), *_ = [(name, data) for name, data in files.items() if name.startswith("model-")]
    again = {f"original/{name}": weights, "consolidated.safetensors": weights}
    with serving(Hub({REPO: {COMMIT: {**files, **again}, NEWER: {}}})) as server:
        server.breaks[name] = len(weights) // 2
        command = [sys.executable, convert_checkpoint.__file__, "hf-to-native", REPO]
        env = environment(tmp_path / "home", server.endpoint)

        def convert(dst: str) -> subprocess.CompletedProcess[str]:
            words = [*command, dst, "--no-verify"]
            return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

        for dst in ("native", "again"):
            ended = convert(dst)
            assert ended.returncode == 0, ended.stderr
            assert origin_of(read_manifest(tmp_path / dst).trainer) == {"repo": REPO, "commit": COMMIT}
            if dst == "native":
                wanted = {n for n in files if not n.endswith((".py", ".bin"))}
                assert server.files_asked_for() == wanted
                server.requests.clear()
        assert not server.files_asked_for()
        server.branches["main"] = NEWER
        assert f"{REPO}@{NEWER}: has no config.json: {server.endpoint} gives none" in convert("newer").stderr
        assert not (tmp_path / "newer").exists()


@pytest.mark.slow
def test_a_transfer_goes_on_where_it_broke(tmp_path: Path) -> None:
    data = bytes(range(256)) * (25 * 2**12)  # the library keeps pieces of 10 MB
    with serving(Hub({REPO: {COMMIT: {"model.safetensors": data}}})) as server:
        server.breaks["model.safetensors"] = 22 * 2**20
        ((_, _, folder),) = fetch_apart([(REPO, "model.safetensors")], environment(tmp_path, server.endpoint))
        assert (Path(folder) / "model.safetensors").read_bytes() == data
        assert any(line.endswith("bytes=20971520-") for line in server.requests), server.requests


def test_an_interrupted_download_ends_at_once() -> None:
    """It runs in a fork (`apart`), which would go on for as long as the weights take."""
    code = """
import multiprocessing, os, signal, threading, time
from megapar.system.apart import apart
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    apart(time.sleep, 1000)
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "interrupted []\n", ended.stderr


def test_a_run_without_such_a_name_does_not_import_the_library() -> None:
    code = "import sys, megapar.config.files; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
