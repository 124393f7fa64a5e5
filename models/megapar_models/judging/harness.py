"""lm-evaluation-harness on a native checkpoint: its LM interface, for the tasks it has and for your own.

Needs the package lm_eval. Log-likelihoods of pairs and of whole texts, and continuations, as its own HFLM computes them
on an export. Texts begin with the start token where the tokenizer's files say so.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from megapar_tools.prepare.texts import Texts

from megapar.base.errors import ConfigError
from megapar_models.judging.judge import Score, Window, sliding
from megapar_models.judging.requests import Answer

_MOST_TOKENS = 1 << 20  # in a request to all ranks
_TOKENS = 256  # to generate, if a task does not say how many: as HFLM
_KNOWN = {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p"}


class NativeLM(TemplateLM):
    """The model of a checkpoint, as lm-evaluation-harness asks it. It is on rank 0 alone, and asks all with `ask`."""

    def __init__(self, ask: Answer, texts: Texts, max_length: int):
        super().__init__()
        self._ask = ask
        self._texts = texts
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        return self._texts.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return self._texts.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, behind the start token unless `add_special_tokens` is False."""
        if add_special_tokens is False:
            return self._texts.tokenizer.encode(string).tolist()
        return self._texts.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                what = f"{len(continuation)} tokens, not 1 to train.seq_length={self.max_length}"
                raise ConfigError(f"the continuation {text[:40]!r} has {what}")
            windows.append(Window([*context, *continuation][-self.max_length - 1 :], len(continuation)))
        found = [(score.log_prob, score.greedy) for score in self._scores(windows)]
        for (texts, _, _), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows without overlap."""
        windows, counts = [], []
        for request in requests:
            # As HFLM does, a start token is scored too, behind another one.
            ids = self.tok_encode(*request.args)
            of_text = list(sliding(ids, (self.prefix_token_id,), self.max_length, self.max_length))
            windows += of_text
            counts.append(len(of_text))
        scores = iter(self._scores(windows))
        found = [sum(next(scores).log_prob for _ in range(count)) for count in counts]
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to one of the texts that end it. Requests of equal options go together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            # Of like length together: a batch is as long as its longest.
            prompts = [self.tok_encode(requests[number].args[0]) or [self.prefix_token_id] for number in numbers]
            order = sorted(range(len(numbers)), key=lambda i: -len(prompts[i]))
            texts = self._ask("continue", [[prompts[i] for i in order], *_generation(options)])
            for i, text in zip(order, texts, strict=True):
                found[numbers[i]] = text
                self.cache_hook.add_partial("generate_until", requests[numbers[i]].args, text)
        return found

    def _scores(self, windows: Sequence[Window]) -> list[Score]:
        found: list[Score] = []
        while len(found) < len(windows):
            part: list[Window] = []
            tokens = 0
            for window in windows[len(found) :]:
                tokens += len(window.ids)
                if part and tokens > _MOST_TOKENS:
                    break
                part.append(window)
            found += self._ask("score", part)
        return found


def _generation(options: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
    """The most tokens, the texts that end a continuation, and the fields of `Sampling`, of a task's options."""
    given = normalize_gen_kwargs(options, _TOKENS)
    unknown = sorted(set(given) - _KNOWN)
    if unknown:
        raise ConfigError(f"generation_kwargs {', '.join(unknown)}: not known here, only {', '.join(sorted(_KNOWN))}")
    until = [text for text in given["until"] if text]
    temperature = float(given.get("temperature", 0.0)) if given["do_sample"] else 0.0
    sampling = {"temperature": temperature, "top_k": given.get("top_k", 0), "top_p": given.get("top_p", 1.0)}
    return given["max_gen_toks"], until, sampling
