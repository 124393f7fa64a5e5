"""What the keys of rows and messages mean: used, without meaning and passed over, or refused by name.

A column that nobody reads might say what is trained, such as tools, a system message, or the weight of a message. So a
key is never dropped because nobody knows it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

# They say where a row or message comes from, or how good it is, and change neither a text nor what is trained.
_NAMES = (
    "id _id idx index uuid row_id prompt_id question_id conversation_id conversation_hash message_id session_id "
    "thread_id request_id user_id hash __index_level_0__ source sources source_url url dataset dataset_name "
    "dataset_source origin subset split "
    "category categories topic topics domain domains task task_type type tags tag language lang license "
    "difficulty toxic toxicity redacted "
    "author annotator annotator_id created_at create_time update_time updated_at timestamp date time version meta "
    "metadata extra_info info info_source model models model_name generator chosen_model rejected_model "
    "generation_model teacher_model "
    "score scores rating ratings quality quality_score score_chosen score_rejected chosen_score rejected_score "
    "chosen_rating rejected_rating chosen-rating rejected-rating chosen_avg_rating rejected_avg_rating "
    "reward_model_score "
    "num_turns turn turns num_tokens token_count length token_length "
)
WITHOUT_MEANING = frozenset(_NAMES.split())
# Of messages: names and numbers that only some templates write.
_OF_MESSAGES = frozenset({"name", "tool_call_id", "tool_name"})


def _reads_nothing(_: str) -> bool:
    return False


@dataclass
class Keys:
    """How the keys of rows and messages are taken, and how often a key with a value was passed over.

    `passed_over` are keys that a person wants left out. `template_reads` says whether the chat template reads a key of
    a message.
    """

    passed_over: Collection[str] = ()
    template_reads: Callable[[str], bool] = _reads_nothing
    counts: dict[str, int] = field(default_factory=dict)

    def wanted(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a row or message that have a value and are not to be passed over."""
        # Columns of parquet exist for every row and message, and are null where one has no such key.
        found = {key: value for key, value in item.items() if value is not None}
        return {key: value for key, value in found.items() if key not in self.passed_over or not self._count(key)}

    def check_rest(self, row: Mapping[str, Any], used: Collection[str]) -> None:
        """Count the keys of a row without meaning. Raises ValueError naming keys that are neither these nor `used`."""
        self._refuse([key for key in row if key not in used and not self._has_no_meaning(key)], "the row")

    def for_template(self, message: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
        """The keys of a message besides `used` that the template reads. Keys without meaning are counted.

        Raises ValueError naming the keys that are neither.
        """
        rest = {key: value for key, value in message.items() if key not in used}
        read = {key: value for key, value in rest.items() if self.template_reads(key)}
        unknown = [key for key in rest if key not in read and not self._has_no_meaning(key, key in _OF_MESSAGES)]
        self._refuse(unknown, f"a message of {message.get('role', message.get('from'))}")
        return read

    def _has_no_meaning(self, key: str, of_message: bool = False) -> bool:
        return (of_message or key in WITHOUT_MEANING) and self._count(key)

    def _count(self, key: str) -> bool:
        self.counts[key] = self.counts.get(key, 0) + 1
        return True

    def _refuse(self, keys: Collection[str], whose: str) -> None:
        if keys:
            names = " ".join(map(str, keys))
            raise ValueError(
                f"{whose} has {', '.join(map(str, keys))}, which might change what is trained and which nobody reads; "
                f"--pass_over {names} leaves {'it' if len(keys) == 1 else 'them'} out"
            )
