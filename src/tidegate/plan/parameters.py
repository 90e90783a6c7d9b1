"""What a decoder of a given shape stores, multiplies and reads: numbers of elements, norms and biases left aside.

    stored      all matrices, whatever a token uses of them; tied embeddings once
    multiplied  by one token: of a layer's experts only those that its router chooses (two operations an element)
    prompt's    by a token that is not sampled from: of the last layer only what makes its keys and values (and its
                query), where the model is one of this engine's own
    read        by a step of n tokens: as much as that, but of its experts those that any of the tokens goes to
    attention   operations for each pair of a query and a key, over all heads and layers

Which experts a token goes to is taken to be even chance, as routers are trained to make it. Then a step of n tokens, of
which each goes to k of E experts, reads E · (1 - (1 - k/E)^n) of them on average. Latent attention is counted as this
engine computes it (arXiv 2405.04434, absorbed): every head attends over the latent vectors themselves.
"""

from tidegate.base.specs import ExpertsSpec, LatentSpec, ModelSpec


def stored_elements(model: ModelSpec) -> int:
    tables = 1 if model.tied_embeddings else 2
    experts = model.experts.num_experts if model.experts else 0
    return round(_layers(model, experts)) + tables * _table(model)


def multiplied_elements(model: ModelSpec) -> int:
    """In the layers; the table of logits aside, which only tokens that are sampled from are multiplied with."""
    return round(_layers(model, model.experts.per_token if model.experts else 0))


def prompt_elements(model: ModelSpec) -> tuple[int, int]:
    """Of those that a prompt's token is multiplied with, the ones of the experts that a router chooses, and the
    others."""
    others, of_experts = multiplied_elements(model), 0
    experts, last = model.experts, model.experts_of(model.num_layers - 1)
    if experts is not None:
        of_experts = round(_layers(model, experts.per_token) - _layers(model, 0))
        others -= of_experts
    if model.transformers_config is None:
        others -= _output_projection(model)
        if last is None:
            others -= _mlp(model, model.ffn_size)
        else:
            chosen = last.per_token * _mlp(model, last.ffn_size)
            others -= round(_experts(model, last, last.per_token)) - chosen
            of_experts -= chosen
    return of_experts, others


def read_elements(model: ModelSpec, tokens: int) -> float:
    """By a step, the table of logits included."""
    return _layers(model, distinct_experts(model.experts, tokens) if model.experts else 0) + _table(model)


def distinct_experts(experts: ExpertsSpec, tokens: int) -> float:
    """Of one layer's, that so many tokens go to, on average."""
    missed = (1.0 - experts.per_token / experts.num_experts) ** tokens
    return experts.num_experts * (1.0 - missed)


def pair_flops(model: ModelSpec) -> float:
    """Of attention, for each pair of a query and a key."""
    latent = model.latent
    per_head = model.head_dim + (latent.rank if latent else model.head_dim)  # the score, and the sum of values
    return 2.0 * model.num_layers * model.num_heads * per_head


def _layers(model: ModelSpec, used_experts: float) -> float:
    """Of all layers, with so many experts of each that has any."""
    attention = _latent_attention(model, model.latent) if model.latent else _attention(model)
    with_experts = [model.experts_of(layer) for layer in range(model.num_layers)]
    mlps = sum(
        _mlp(model, model.ffn_size) if experts is None else _experts(model, experts, used_experts)
        for experts in with_experts
    )
    return model.num_layers * attention + mlps


def _output_projection(model: ModelSpec) -> int:
    """What the results of all heads of attention are multiplied with."""
    return model.num_heads * (model.latent.value_dim if model.latent else model.head_dim) * model.hidden_size


def _attention(model: ModelSpec) -> int:
    return model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)


def _latent_attention(model: ModelSpec, latent: LatentSpec) -> int:
    queries = model.num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        query = model.hidden_size * queries
    else:
        query = latent.query_rank * (model.hidden_size + queries)
    to_latent = model.hidden_size * (latent.rank + latent.rope_dim)
    of_heads = model.num_heads * (latent.nope_dim + latent.value_dim) * latent.rank
    return query + to_latent + of_heads + _output_projection(model)


def _experts(model: ModelSpec, experts: ExpertsSpec, used: float) -> float:
    router = model.hidden_size * (experts.num_experts + experts.shared_gated)
    return router + _mlp(model, experts.shared_ffn_size) + used * _mlp(model, experts.ffn_size)


def _mlp(model: ModelSpec, ffn_size: int) -> int:
    return 3 * model.hidden_size * ffn_size


def _table(model: ModelSpec) -> int:
    return model.vocab_size * model.hidden_size
