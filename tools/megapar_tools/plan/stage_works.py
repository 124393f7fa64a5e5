"""The recorded parts of a pipeline's stages: embedding, each layer, norm with head. Like parts are recorded once."""

from megapar.config.options import Config
from megapar_tools.plan.parts import FIRST, LAST, Parts
from megapar_tools.plan.recorded import Recording

Stage = list[tuple[Recording, int]]
"""The parts of a pipeline stage in their order. A number says how often a part follows itself."""


def stages_of(config: Config, parts: Parts) -> list[Stage]:
    """The parts of each of the pp * vpp stages, on the first rank.

    `config` is validated, and its kernels are those of the planned machine.
    """
    ctx = parts.context(config, 0)
    of_layer = parts.layer_parts(config, ctx)
    layers_of_stages = parts.builder.stage_layers(config)
    found = []
    for number, layers in enumerate(layers_of_stages):
        ids = [of_layer[layer] for layer in layers]
        stage: Stage = []
        if number == 0:
            stage.append((parts.recording(config, ctx, FIRST), 1))
        for part, before in zip(ids, [None, *ids], strict=False):
            if part == before:
                stage[-1] = stage[-1][0], stage[-1][1] + 1
            else:
                stage.append((parts.recording(config, ctx, part), 1))
        if number == len(layers_of_stages) - 1:
            stage.append((parts.recording(config, ctx, LAST), 1))
        found.append(stage)
    return found
