"""Makes pages of the documentation from the code, for mkdocs. mkdocs.yml names this file as a hook.

- `options.md`: every option, from the dataclasses of the configuration and the sentence under each field.
- `api/*.md`: a page for each package; mkdocstrings renders its docstrings.
- README.md, CONTRIBUTING.md and CHANGELOG.md as pages, so no text exists twice.
- A page for each linked file of the repository, so links work here as they do in the repository.
"""

import ast
import inspect
import posixpath
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megapar_models.registry import FOR_OPTIONS

from megapar.config.options import Config, Length, option_types

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PACKAGE_FOLDERS = ("megapar", "models/megapar_models", "kernels/megapar_kernels", "tools/megapar_tools")
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")
BEHIND = "---\nsearch:\n  boost: 0.5\n---\n\n"  # who searches for an option wants its explanation before its field
WIDE = {"reading.md"}  # the picture of the rooms is legible only with the width of the table of contents
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".txt": "text", "": "text"}


# mkdocs calls these functions by their names.


def on_config(config: Any) -> Any:
    """Append the API pages to the navigation."""
    config.nav.append({"API": [{title: page} for page, (title, _) in api_pages().items()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File, InclusionLevel

    for repository_path, page in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / repository_path).read_text()))
    files.append(File.generated(config, "options.md", content=options_page()))
    for page, (_, text) in api_pages().items():
        files.append(File.generated(config, page, content=text))
    for repository_path in sorted(linked_files()):
        page = site_path(repository_path)
        text = file_page(repository_path)
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files of the repository at their pages. Pages in WIDE lose their table of contents."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    sources = {site: repository for repository, site in DOCUMENTS.items()}
    origin = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return rewrite_links(markdown, origin)


# Links


def site_path(repository_path: str) -> str:
    """The path on the site of a file of the repository."""
    if repository_path in DOCUMENTS:
        return DOCUMENTS[repository_path]
    if repository_path.startswith("docs/"):
        return repository_path.removeprefix("docs/")
    return f"files/{repository_path}.md"


def rewrite_links(markdown: str, origin: str) -> str:
    """The text of document `origin`, a path in the repository, with links to the same files on the site.

    A link to a missing file stays as it is, and mkdocs reports it as an error.
    """
    folder = posixpath.dirname(site_path(origin))

    def site_link(match: re.Match[str]) -> str:
        target = repository_target(match[2], origin)
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(site_path(target), folder or '.')}{match[3] or ''})"

    return LINK.sub(site_link, markdown)


def repository_target(link: str, origin: str) -> str | None:
    """The file of the repository behind `link` in document `origin`; None if there is no such file."""
    if "://" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    if (ROOT / target).is_file():
        return target
    return None


def linked_files() -> set[str]:
    """The files outside docs/ linked from documents."""
    documents = [ROOT / name for name in DOCUMENTS] + sorted((ROOT / "docs").rglob("*.md"))
    targets = set()
    for document in documents:
        origin = document.relative_to(ROOT).as_posix()
        for match in LINK.finditer(document.read_text()):
            target = repository_target(match[2], origin)
            if target is not None and target not in DOCUMENTS and not target.startswith("docs/"):
                targets.add(target)
    return targets


def file_page(repository_path: str) -> str:
    """A page with the content of a file."""
    # Excluded from the search, and fenced by six backticks, because a file may hold three.
    path = ROOT / repository_path
    language = LANGUAGES.get(path.suffix, "text")
    front_matter = "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{front_matter}# {repository_path}\n\n``````{language}\n{path.read_text()}``````\n"


# API


def api_pages() -> dict[str, tuple[str, str]]:
    """Title and text of a page for each package with code, by the page's path."""
    pages = {}
    for folder in PACKAGE_FOLDERS:
        root = ROOT / folder
        for package in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
            name = package.relative_to(root.parent).as_posix().replace("/", ".")
            modules = sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
            if modules:
                blocks = [f"::: {name}.{module}" for module in modules]
                pages[f"api/{name}.md"] = (name, "\n\n".join([f"{BEHIND}# {name}", *blocks]) + "\n")
    return pages


# Options


def options_page() -> str:
    """Every option with its type, default and meaning."""
    parts = [
        "# Options",
        "Every option of a training run. In TOML an option is a key of its section (`[model]`, `hidden_size = 256`). "
        "As a flag it has a dotted name (`--model.hidden_size 256`). A switch has two flags: `--train.deterministic` "
        "and `--train.no_deterministic`. Values come from the defaults, then from `--config` files, then from flags.",
        "This page is made from the dataclasses of the configuration. `--help` prints the same sentences.",
    ]
    top = [field for field in fields(Config) if not is_dataclass(get_type_hints(Config)[field.name])]
    parts += ["## The run", _table(Config, top, "")]
    parts += list(_sections(Config, ""))
    parts += [
        "## Options of families",
        "Those of `model` that some families read. The words at the end of a line name the families. A default may "
        "differ from family to family: that of the first one is shown.",
        _table_of_families(),
    ]
    return "\n\n".join(parts) + "\n"


def _sections(options: Any, prefix: str) -> Iterator[str]:
    """Yield a heading, a sentence and a table for each section. Nested sections follow their outer section."""
    for name, section in get_type_hints(options).items():
        if not is_dataclass(section):
            continue
        types = get_type_hints(section)
        yield f"## {prefix}{name}"
        yield inspect.cleandoc(section.__doc__ or "")
        yield _table(section, [f for f in fields(section) if not is_dataclass(types[f.name])], f"{prefix}{name}.")
        yield from _sections(section, f"{prefix}{name}.")


def _table_of_families() -> str:
    """A line for each option that some families have beyond those of all families."""
    common = option_types()
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for path, annotation in FOR_OPTIONS.types().items():
        if path in common:
            continue
        readers = FOR_OPTIONS.readers(path)
        first = next(iter(readers))
        sentence = _sentence(FOR_OPTIONS.known[first].options, path.split(".")[1:])
        cells = (f"`{path}`", type_name(annotation), f"`{_toml(readers[first])}`", f"{sentence} ({', '.join(readers)})")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _sentence(options: Any, names: list[str]) -> str:
    """The sentence under a field of a dataclass, or under one of its sections: `names` leads there."""
    if len(names) > 1:
        return _sentence(get_type_hints(options)[names[0]], names[1:])
    # A field may stand in a class above.
    found = [sentences_of(above) for above in options.__mro__ if is_dataclass(above)]
    return next(sentences[names[0]] for sentences in found if names[0] in sentences)


def _table(options: Any, chosen: list[Field[Any]], prefix: str) -> str:
    sentences = sentences_of(options)
    types = get_type_hints(options)
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for field in chosen:
        cells = (
            f"`{prefix}{field.name}`",
            type_name(types[field.name]),
            f"`{_default(field)}`",
            sentences[field.name],
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(field: Field[Any]) -> str:
    """The default value in TOML's syntax."""
    assert field.default is not MISSING, field.name
    return _toml(field.default)


def _toml(value: Any) -> str:
    if isinstance(value, bool):  # TOML writes true and false
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    return str(value)


def type_name(annotation: Any) -> str:
    """The possible values of an option, in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return f"list of {type_name(inner[0])}"
        return f"{len(inner)} of {type_name(inner[0])}"
    if annotation == Length:
        return "whole number, or text"
    return {int: "whole number", float: "number", bool: "switch", str: "text"}[annotation]


def sentences_of(options: Any) -> dict[str, str]:
    """The string under each field of a dataclass, joined to one line, by the field's name."""
    # Python does not keep these strings at run time, so they are read from the source.
    body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            sentences[ast.unparse(node.target)] = " ".join(str(following.value.value).split())
    return sentences
