"""The part of the model that one miner holds: embedding or the receiving side of a cut, layers, head or the sending side.

Shapes: B batch, T tokens, D model width, K bottleneck width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from subnet.config import Bottleneck, RunConfig
from subnet.model.bottleneck import Anchor, Cut, IotaLayer, in_float32, nothing, resbm_decoder, resbm_encoder, widen
from subnet.model.layers import DecoderLayer, RmsNorm, rope_tables
from subnet.model.partition import has_anchor, is_first, is_last, layers_of
from subnet.types import StageIndex


class _Body(nn.Module):
    """Holds what Hugging Face keeps under `model.`."""

    def __init__(self, config: RunConfig, stage: StageIndex) -> None:
        super().__init__()
        model, indices = config.model, layers_of(config, stage)
        layers: dict[str, nn.Module] = {str(index): DecoderLayer(model) for index in indices}
        receives, sends = not is_first(config, stage), not is_last(config, stage)
        if model.bottleneck is Bottleneck.IOTA:
            for index in (indices[0], indices[-1]):
                layers[str(index)] = IotaLayer(
                    model, receives=receives and index == indices[0], sends=sends and index == indices[-1]
                )
        self.embed_tokens = None if receives else nn.Embedding(model.vocab_size, model.width)
        self.layers = nn.ModuleDict(layers)
        self.norm = None if sends else RmsNorm(model.width, model.norm_eps)


class StageModule(nn.Module):
    """One stage; the last returns the mean loss in nats for each token, every other what it sends, in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RunConfig, stage: StageIndex) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.design = model.bottleneck
        self.model = _Body(config, stage)
        self.lm_head = nn.Linear(model.width, model.vocab_size, bias=False) if is_last(config, stage) else None
        cuts: dict[str, nn.Module] = {}
        if not is_first(config, stage):
            cuts[str(stage - 1)] = Cut(
                decoder=resbm_decoder(model) if self.design is Bottleneck.RESBM else None,
                anchor=Anchor(model) if has_anchor(model) else None,
            )
        if not is_last(config, stage) and self.design is Bottleneck.RESBM:
            cuts[str(stage)] = Cut(encoder=resbm_encoder(model))
        self.cuts = nn.ModuleDict(cuts)
        self._receiving = None if is_first(config, stage) else str(stage - 1)
        self._sending = str(stage)
        cos, sin = rope_tables(model, config.training.num_tokens)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def layers(self) -> nn.ModuleDict:
        """Layers by index."""
        return self.model.layers

    def forward(self, received_BTK: Tensor | None, tokens: Tensor) -> Tensor:
        """What came over the wire (None on stage 0) and (B, T + 1) ids -> what is sent, or the loss."""
        ids_BT = tokens[:, :-1]
        stream = self.send(self.run_layers(self.receive(received_BTK, ids_BT), ids_BT))
        return stream if self.lm_head is None else self.loss(stream, tokens[:, 1:])

    def _anchor(self, ids_BT: Tensor) -> Tensor | None:
        cut = None if self._receiving is None else self.cuts[self._receiving]
        return None if not isinstance(cut, Cut) or cut.anchor is None else cut.anchor(ids_BT)

    def receive(self, received_BTK: Tensor | None, ids_BT: Tensor) -> Tensor:
        """Where the layers start from; the iota design decodes inside its first layer, so K channels pass through here."""
        if self.model.embed_tokens is not None:
            embedded_BTD: Tensor = self.model.embed_tokens(ids_BT)
            return embedded_BTD
        assert received_BTK is not None, "a stage after the first needs an activation"
        if self.design is Bottleneck.IOTA:
            return received_BTK
        anchor_BTD = self._anchor(ids_BT)
        if self.design is Bottleneck.K0:
            assert anchor_BTD is not None
            return anchor_BTD
        stream_BTD = received_BTK
        if self.design is Bottleneck.RESBM:
            cut = self.cuts[str(self._receiving)]
            assert isinstance(cut, Cut) and cut.decoder is not None
            with in_float32(received_BTK):
                stream_BTD = cut.decoder(received_BTK) + widen(received_BTK, self.config.model.width)
        return stream_BTD if anchor_BTD is None else stream_BTD + anchor_BTD

    def run_layers(self, stream: Tensor, ids_BT: Tensor) -> Tensor:
        """Every layer of the stage, in order."""
        num_tokens = ids_BT.shape[1]
        rope = (self.cos[:num_tokens], self.sin[:num_tokens])
        for layer in self.model.layers.values():
            if isinstance(layer, IotaLayer) and layer.expand is not None:
                stream = layer.feed(layer.receive(stream, rope, self._anchor(ids_BT)))
            else:
                stream = layer(stream, rope)
        return stream

    def send(self, stream: Tensor) -> Tensor:
        """(B, T, K) float32 before rounding; the last stage's stream stays as it is."""
        if self.lm_head is not None:
            return stream
        match self.design:
            case Bottleneck.RESBM:
                cut = self.cuts[self._sending]
                assert isinstance(cut, Cut) and cut.encoder is not None
                wide_BTD = stream.to(torch.float32)
                with in_float32(wide_BTD):
                    code_BTK: Tensor = cut.encoder(wide_BTD) + wide_BTD[..., : self.config.model.bottleneck_width]
                return code_BTK
            case Bottleneck.K0:
                return nothing(stream).to(torch.float32)
            case Bottleneck.IOTA | Bottleneck.NONE:
                return stream.to(torch.float32)

    def loss(self, stream_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross entropy, a float32 scalar."""
        assert self.model.norm is not None and self.lm_head is not None, "only the last stage has a loss"
        logits_BTV = self.lm_head(self.model.norm(stream_BTD)).to(torch.float32)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def build_stage(config: RunConfig, stage: StageIndex) -> StageModule:
    """A stage without values of its own: params are handed to each call, so that any version of them can be live.

    Building on the meta device draws no random numbers and holds no second copy.
    """
    with torch.device("meta"):
        return StageModule(config, stage)
