"""Which of a model's tensors are matrices that activations are multiplied with, by the names of ``models.weights``."""

from tidegate.base.specs import ExpertsSpec, ModelSpec


def matrices(spec: ModelSpec) -> list[str]:
    """Those of every token: all but those of experts, and none where transformers' modules do it."""
    if spec.transformers_config is not None:
        return []
    names = []
    for i in range(spec.num_layers):
        names += [f"layers.{i}.{name}" for name in _of_attention(spec) + _of_feed_forward(spec.experts_of(i))]
    return [*names, "lm_head"]


def expert_matrices(spec: ModelSpec) -> list[str]:
    """Those of the tokens that a router sends there."""
    layers = [i for i in range(spec.num_layers) if spec.experts_of(i) is not None]
    return [f"layers.{i}.experts_{name}" for i in layers for name in ("gate_up", "down")]


def float_name(spec: ModelSpec, name: str) -> str:
    """The tensor that a matrix is where it is not quantised."""
    return "embed" if name == "lm_head" and spec.tied_embeddings else name


def _of_attention(spec: ModelSpec) -> list[str]:
    if spec.latent is None:
        return ["qkv", "o"]
    return (["q"] if spec.latent.query_rank is None else ["q_a", "q_b"]) + ["kv_a", "o"]


def _of_feed_forward(experts: ExpertsSpec | None) -> list[str]:
    if experts is None:
        return ["gate_up", "down"]
    shared = ["shared_gate_up", "shared_down"] if experts.shared_ffn_size else []
    return ["router", *shared, *(["shared_router"] if experts.shared_gated else [])]
