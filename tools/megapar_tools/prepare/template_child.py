"""The program that renders chat templates: a process with little memory and little time, started by `TemplateProcess`.

Templates come with published tokenizers, and jinja's sandbox does not limit what they compute. Each line of the input
is a request, and each line of the output the answer to it, as JSON. What a template sees is what transformers shows it:
jinja's sandbox without lines of its own, `tojson` with its options, `raise_exception` and `strftime_now`.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}` as a block of text, with the marks of the request around it."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        marks: Any = self.environment.globals["generation_marks"]
        first, last = marks
        return f"{first}{caller()}{last}"


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `value` as JSON, without the escapes for HTML of jinja's own filter, as transformers does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """Templates by their source, compiled once."""

    def __init__(self) -> None:
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = to_json
        self._environment.globals |= {"raise_exception": self._refuse, "strftime_now": self._now}
        self._compiled: dict[str, jinja2.Template] = {}
        self._request: dict[str, Any] = {}
        self._read_clock = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the text and whether the clock was read, or why there is no text: `refused` or `fails`."""
        self._request, self._read_clock = request, False
        self._environment.globals["generation_marks"] = request["marks"]
        try:
            source = request["source"]
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            if "variables" not in request:
                return {"text": ""}
            text = self._compiled[source].render(**request["variables"])
            if len(text) > request["letters"]:
                return {"fails": f"writes {len(text):,} letters, more than {request['letters']:,}"}
            text.encode()
        except UnicodeEncodeError:
            return {"fails": "writes half of a surrogate pair, its own or of a message, which is no letter"}
        except jinja2.TemplateError as error:
            return {"refused": str(error) or type(error).__name__}
        except MemoryError:
            return {"fails": "wants too much memory"}
        except Exception as error:  # whatever a template makes Python raise is a fault of the template
            return {"fails": f"{type(error).__name__}: {error}"}
        return {"text": text, "read_clock": self._read_clock}

    def _refuse(self, message: str) -> None:
        raise jinja2.TemplateError(message)

    def _now(self, form: str) -> str:
        self._read_clock = True
        return datetime.fromisoformat(self._request["now"]).strftime(form)


def main() -> None:
    """Answer each line of the input. The arguments are CPU seconds for an answer, and bytes of memory."""
    seconds, num_bytes = float(sys.argv[1]), int(sys.argv[2])
    # A terminal sends Ctrl-C to all processes of the group. The parent answers it, and this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere the limit of memory is not kept, or refused
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    renderer = Renderer()
    for line in sys.stdin.buffer:
        # A template may spend its time in one call of C, where no handler would run. So the kernel ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(renderer.answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
