"""Counts a model: its tensors, parameters and FLOPs, as its parameters and modules declare them.

A parameter declares its tensors (`ParamSpec`). A module with products without weights, such as attention's scores,
declares their FLOPs by a method `flops_per_token(seq_length)`. It returns the FLOPs of one token's forward pass as an
int: those of the whole module on one rank, without those of the modules inside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from megapar.activations.recompute import Recompute
from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import NO_ADAPTER, AdapterConfig, Config
from megapar.declare.context import single
from megapar.declare.params import ParamSpec, Piece, Sizes, selected, spec_of
from megapar.declare.sharding import Sharding
from megapar_models.factory import initializations
from megapar_models.registry import find

_HEADS = ("head.weight", "score.weight")


class WholeModel:
    """A model in one stage on the meta device, the source of all counts.

    A large one takes tenths of a second to build. `declarations` has every logical tensor by name, with the declaration
    of its parameter. A fused parameter declares several tensors. A tied embedding is listed once. Those of adapters are
    among them if there are any by `adapter`. Raises ConfigError if a pattern of `Factory.beside`, or one of
    adapter.targets, matches no matrix.
    """

    def __init__(self, model: ModelConfig, adapter: AdapterConfig = NO_ADAPTER):
        self.model = model
        sharding = Sharding.of(single(torch.device("meta")), torch.float32)
        family = find(model.family)
        factory = replace(family.factory(sharding, *initializations(model)), adapter=adapter)
        layers = range(model.num_hidden_layers)
        self._stage = family.stage(model, factory, layers, first=True, last=True, recompute_rule=Recompute())
        # Here, because a rank of a pipeline may rightly have no match. All ranks build the whole model alike.
        if unmatched := [pattern for pattern in factory.beside if pattern not in factory.matched]:
            raise _everywhere(
                f"model.family {model.family}: Factory.beside", unmatched, "matches no matrix of the model"
            )
        matrices = factory.adaptable
        if adapter.rank and (unmatched := adapter.unmatched(matrices)):
            words = sorted({name.rpartition(".")[2] for name in matrices})
            text = f"matches no matrix of the model; its matrices are called {', '.join(words)}"
            raise _everywhere("adapter.targets", unmatched, text)
        specs = [spec_of(param) for param in self._stage.parameters()]
        self.declarations: dict[str, tuple[Piece, ParamSpec]] = {
            piece.name: (piece, spec) for spec in specs for piece in spec.pieces
        }

    def buffers(self) -> dict[str, Piece]:
        """The tensors that are part of the model but no parameters, such as the bias of a router, by name."""
        specs = (getattr(buffer, "spec", None) for buffer in self._stage.buffers())
        return {spec.name: spec.pieces[0] for spec in specs if spec is not None and not spec.training_state}

    def tensors(self) -> dict[str, Piece]:
        """Every logical tensor by name. A tied embedding is listed once."""
        return {name: piece for name, (piece, _) in self.declarations.items()}

    def parameters(self) -> int:
        """The number of parameters, without padding of the vocabulary. A tied embedding counts once."""
        return sum(torch.Size(piece.shape).numel() for piece, _ in self.declarations.values())

    def active_parameters(self) -> int:
        """The number of parameters in the computation of a token: of a mixture, those of its own experts alone."""
        counts = (torch.Size(piece.shape).numel() * spec.token_share for piece, spec in self.declarations.values())
        return round(sum(counts))  # a whole number: each layer has num_experts_per_tok times an expert's parameters

    def size_in_words(self) -> str:
        """The number of parameters, and of active ones if some tokens do not use all experts."""
        total = self.parameters()
        active = self.active_parameters()
        if active == total:
            return f"{total:,} parameters"
        return f"{total:,} parameters, {active:,} active"

    def layer_kinds(self, seq_length: int) -> list[int]:
        """For each layer the number of the first layer of the same kind.

        Layers are of one kind if they declare so (`Stage.layer_kind`), if their tensors have the same names and shapes,
        if they are made of modules of the same classes with the same products, and if their products without weights
        have as many FLOPs.

        Models may have layers with experts and layers without, or layers with other attention.
        """
        tensors: list[set[tuple[str, Sequence[int]]]] = [set() for _ in range(self.model.num_hidden_layers)]
        for name, (piece, _) in self.declarations.items():
            layer = _depth(self.model, name)
            if 0 <= layer < len(tensors):
                tensors[layer].add((name.removeprefix(f"layers.{layer}."), piece.shape))
        declared = [self._stage.layer_kind(self.model, layer) for layer in range(len(tensors))]
        modules: list[list[tuple[str, type, object]]] = [[] for _ in tensors]
        for name, module in self._stage.layers.named_modules(prefix="layers"):
            layer = _depth(self.model, name) if name != "layers" else -1
            if 0 <= layer < len(modules):
                inside = name.removeprefix(f"layers.{layer}")
                modules[layer].append((inside, type(module), getattr(module, "products", None)))
        kinds = list(zip(declared, tensors, modules, self.products_of_layers(seq_length), strict=True))
        return [kinds.index(kind) for kind in kinds]

    def layer_costs(self, seq_length: int) -> list[float]:
        """For each layer the multiplications of one token's forward pass, each with its addition. Lookups have none."""
        costs = [flops / 2 for flops in self.products_of_layers(seq_length)]
        for name, (piece, spec) in self.declarations.items():
            layer = _depth(self.model, name)
            if 0 <= layer < len(costs) and not piece.grows:
                costs[layer] += float(torch.Size(piece.shape).numel() * spec.token_share)
        return costs

    def flops_per_token(self, seq_length: int, trainable: Sequence[str] = ()) -> int:
        """The FLOPs of forward and backward for one token, with `trainable` as train.trainable.

        Each weight of a matrix product counts 2 for the forward pass, 2 for the gradient of the product's input, and 2
        for its own gradient: those of the head do, those of the embedding's lookup do not. Of a mixture's experts only
        the token's own count. Products without weights count what their modules declare for the forward pass, and twice
        as much for the backward pass. As in Megatron-LM, attention counts over the whole sample, also if
        data.documents=apart computes less.

        Frozen weights have no gradient of their own. Gradients of inputs are counted back to the first layer with a
        trained parameter, and for all products of this layer. Layers before it need none.
        """
        layers = self.model.num_hidden_layers
        further = self.model.num_nextn_predict_layers
        trained: set[str] = set()
        for param in self._stage.parameters():
            spec = spec_of(param)
            if param.requires_grad and selected(spec, trainable):  # a model may freeze a parameter of its own
                trained.update(piece.name for piece in spec.pieces)
        first = min((_depth(self.model, name) for name in trained), default=layers + further + 2)
        # A tied head is listed as the embedding.
        head = next(name for name in (*_HEADS, "embedding.weight") if name in self.declarations)
        total = Fraction(0)
        for name, (piece, spec) in self.declarations.items():
            if len(piece.shape) != 2 or piece.grows or name in ("positions.weight", *_HEADS):
                continue
            passes = _passes(input_gradient=first <= _depth(self.model, name), weight_gradient=name in trained)
            total += 2 * passes * torch.Size(piece.shape).numel() * spec.token_share
        # The input of the head needs a gradient only if a parameter before it is trained. Each layer of multi-token
        # prediction has a product of its own with the head.
        for depth in range(layers, layers + 1 + further):
            trains = head in trained and not (depth > layers and self.model.mtp_detach)
            passes = _passes(input_gradient=first <= depth, weight_gradient=trains)
            total += 2 * passes * torch.Size(self.declarations[head][0].shape).numel()
        for depth, flops in self._products(seq_length):
            total += 3 * flops if first <= depth else flops
        return round(total)  # a whole number: each layer has num_experts_per_tok times an expert's FLOPs

    def _products(self, seq_length: int) -> Iterator[tuple[int, int]]:
        """Yield (depth, FLOPs of one token's forward pass) of each module with declared products of its own."""
        for name, module in self._stage.named_modules():
            declared = getattr(module, "flops_per_token", None)
            if declared is not None:
                yield _depth(self.model, name), declared(seq_length)

    def products_of_layers(self, seq_length: int) -> list[int]:
        """The FLOPs of one token's forward pass through each layer, as its modules declare them."""
        layers = [0] * self.model.num_hidden_layers
        for depth, flops in self._products(seq_length):
            if 0 <= depth < len(layers):
                layers[depth] += flops
        return layers


def mtp_cost(whole: WholeModel, seq_length: int) -> float:
    """The multiplications of one token's forward pass in layers of multi-token prediction, with the head after each."""
    model = whole.model
    layers = model.num_hidden_layers
    heads = model.num_nextn_predict_layers * model.head_rows * model.hidden_size
    products = sum(flops / 2 for depth, flops in whole._products(seq_length) if layers < depth <= model.all_layers)
    weights = (
        torch.Size(piece.shape).numel() * spec.token_share
        for name, (piece, spec) in whole.declarations.items()
        if layers < _depth(model, name) <= model.all_layers
    )
    return float(heads + products + sum(weights))


def training_state(whole: WholeModel) -> dict[str, tuple[Sizes, torch.dtype]]:
    """Shape and dtype of the tensors that training needs beside weights and optimizer. They begin at zero."""
    found = {}
    for buffer in whole._stage.buffers():
        spec = getattr(buffer, "spec", None)
        if spec is not None and spec.training_state:
            found[spec.name] = (spec.pieces[0].shape, buffer.dtype)
    return found


def _depth(model: ModelConfig, name: str) -> int:
    """The place of a tensor or module in the forward pass: its layer, -1 before the layers, or after them their
    number and more. The norm has their number, layers of multi-token prediction those behind it, then the head."""
    layers, end = model.num_hidden_layers, model.all_layers + 1
    module, _, rest = name.partition(".")
    if module == "layers":
        number = int(rest.partition(".")[0])
        return number if number < layers else number + 1
    if module == "mtp":
        return layers + 1 + int(rest.split(".")[1])  # mtp.depths.0
    # A name that is not known here counts as one before the layers: the count is then never too small.
    return {"stream_end": layers, "norm": layers, "project_out": layers, "head": end, "score": end}.get(module, -1)


def _everywhere(option: str, patterns: Sequence[str], text: str) -> ConfigError:
    """An error that all ranks raise with the same words."""
    error = ConfigError(f"{option} {' '.join(patterns)}: {text}")
    error.everywhere = True
    return error


def size_and_flops(config: Config) -> tuple[str, int]:
    """The number of parameters in words, and the FLOPs of a token in a run, from one model."""
    whole = WholeModel(config.model, config.adapter)
    return whole.size_in_words(), whole.flops_per_token(config.train.seq_length, config.train.trainable)


def _passes(*, input_gradient: bool, weight_gradient: bool) -> int:
    """How many products as large as the forward one a matrix takes part in."""
    passes = 1
    if input_gradient:
        passes += 1
    if weight_gradient:
        passes += 1
    return passes
