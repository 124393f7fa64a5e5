"""Checks of the options of a mixture of experts, for `megapar.config.validate`."""

import math
from collections.abc import Iterator

from megapar.config.messages import around, counted, divisors, listed, problem, shown
from megapar.config.model_options import MoEConfig
from megapar.config.model_rules import ModelRules
from megapar.config.options import Config, ParallelConfig


def problems(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems of a mixture of experts, and of its axes in a model without experts."""
    moe = config.model.experts
    if moe is None:
        yield from _without_experts(config, f"family {rules.name} has no experts; leave it")
    elif not moe.num_experts:
        # Whatever else is said about experts holds once there are some.
        some = 8 * moe.n_group
        text = f"family {rules.name} is a mixture of experts; use a number such as {some}"
        yield problem(config, "model.moe.num_experts", text)
    else:
        yield from _widths(config, moe)
        yield from _chunks(config, moe)
        yield from _router(config, moe)
        yield from _balance(config, moe)


def _without_experts(config: Config, text: str) -> Iterator[str]:
    """A line for each option of experts' ranks in a model without them. `text` is its beginning."""
    for name in ("ep", "etp", "ep_overlap_chunks"):
        default = getattr(ParallelConfig(), name)
        if getattr(config.parallel, name) != default:
            yield problem(config, f"parallel.{name}", f"{text} at {shown(default)}")


def grid_problems(config: Config) -> Iterator[str]:
    """Problems of ep and etp. Their ranks are those of tp, cp and dp."""
    parallel = config.parallel
    if not config.model.num_experts:
        return
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % (parallel.ep * parallel.etp) == 0:
        return
    text = f"ep({parallel.ep})*etp({parallel.etp}) must divide the {counted(ranks, 'rank')} of a pipeline rank; "
    options = "parallel.ep parallel.etp"
    if ranks % parallel.etp == 0:
        yield problem(config, options, f"{text}ep may be {listed(divisors(ranks // parallel.etp))}")
    else:
        works = f"etp may be {listed(_etp_that_fits(config, ranks))}"
        if parallel.ep > 1:
            works += " and ep may be 1"
        yield problem(config, options, f"{text}{works}")


def _etp_that_fits(config: Config, ranks: int) -> list[int]:
    """How many of `ranks` can share an expert."""
    moe = config.model.experts
    assert moe is not None, "only mixtures have etp"
    return [n for n in divisors(ranks) if moe.moe_intermediate_size % n == 0]


def _widths(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Problems of the widths of experts."""
    parallel = config.parallel
    if moe.moe_intermediate_size % parallel.etp:
        text = f"an expert's width must divide by etp; use {around(moe.moe_intermediate_size, parallel.etp)}"
        yield problem(config, "model.moe.moe_intermediate_size parallel.etp", text)
    if moe.shared_expert_gate and not moe.shared_expert_intermediate_size:
        text = "there is no shared expert to gate; set its width, or leave the gate at false"
        yield problem(config, "model.moe.shared_expert_gate model.moe.shared_expert_intermediate_size", text)


def _chunks(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Problems of the chunks in which the rows of experts travel."""
    parallel = config.parallel
    options = "parallel.ep_overlap_chunks parallel.ep"
    if parallel.ep_overlap_chunks > 1 and parallel.ep == 1:
        text = "without expert parallelism no expert waits for other ranks; set parallel.ep, or leave it at 1"
        yield problem(config, options, text)
    elif parallel.ep_overlap_chunks > max(fewest_experts(config), 1):
        here = counted(moe.num_experts // parallel.ep, "expert")
        text = f"a rank with {here} has no more chunks; use at most {max(fewest_experts(config), 1)}"
        yield problem(config, f"{options} model.moe.num_experts", text)


def fewest_experts(config: Config) -> int:
    """The number of experts of a layer on the rank with the fewest of them."""
    return config.model.num_experts // config.parallel.ep


def _router(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Problems of how the experts of a token are chosen."""
    groups = "model.moe.n_group model.moe.topk_group"
    if moe.num_experts % moe.n_group:
        # Groups of one expert are no groups, and some families add up two scores of each.
        fits = [n for n in divisors(moe.num_experts) if moe.topk_group <= n <= moe.num_experts // 2]
        text = f"groups must have equal numbers of experts; use {listed(fits or [moe.num_experts])}"
        yield problem(config, "model.moe.n_group model.moe.num_experts", text)
    elif moe.topk_group > moe.n_group:
        yield problem(config, groups, f"there are fewer groups; topk_group may be at most {moe.n_group}")
    else:
        eligible = moe.num_experts // moe.n_group * moe.topk_group
        if moe.num_experts_per_tok > eligible:
            text = f"a token can choose among {eligible} experts; use at most {eligible}"
            yield problem(config, f"model.moe.num_experts_per_tok model.moe.num_experts {groups}", text)


def _balance(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Problems of what evens out the load of the experts."""
    defaults = MoEConfig()
    if moe.balance == "micro_batch":
        text = (
            "the load of a micro-batch depends on how ranks share the batch, so this loss would change with the "
            "layout; use sequence, global, bias or bias+sequence"
        )
        yield problem(config, "model.moe.balance", text)
    if (
        moe.balance not in ("sequence", "global", "bias+sequence")
        and moe.router_aux_loss_coef != defaults.router_aux_loss_coef
    ):
        text = "only balance sequence, global and bias+sequence have a loss; choose one of them, or leave it out"
        yield problem(config, "model.moe.router_aux_loss_coef model.moe.balance", text)
    if not moe.has_selection_bias and moe.router_bias_update_rate != defaults.router_bias_update_rate:
        text = "only balance bias and bias+sequence have a bias; choose one of them, or leave it out"
        yield problem(config, "model.moe.router_bias_update_rate model.moe.balance", text)


def shares_experts(config: Config) -> bool:
    """Whether replicas exchange tokens. Then they must run the same number of micro-batches."""
    parallel = config.parallel
    return config.model.num_experts > 0 and _ranks_together(config) % (parallel.ep * parallel.etp) > 0


def _ranks_together(config: Config) -> int:
    """The number of neighboring ranks of one replica, on one pipeline rank."""
    sizes = {"tp": config.parallel.tp, "cp": config.parallel.cp}
    # The ranks of one replica follow each other, as many as the axes have that come before dp in the order.
    names = config.parallel.order.split("-")
    if "dp" in names:
        return math.prod(sizes.get(name, 1) for name in names[: names.index("dp")])
    return 1


def not_shared(config: Config) -> str:
    """Values of ep and etp for replicas without shared experts."""
    parallel = config.parallel
    together = _ranks_together(config)
    if together % parallel.etp == 0:
        return f"ep may be {listed(divisors(together // parallel.etp))}"
    works = f"etp may be {listed(_etp_that_fits(config, together))}"
    if parallel.ep > 1:
        return f"{works} and ep may be 1"
    return works
