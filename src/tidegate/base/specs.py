"""Small frozen descriptions that several packages read. None of them needs torch."""

import msgspec


class RopeScaling(msgspec.Struct, frozen=True):
    """Rotary-embedding scaling as in Hugging Face configurations. ``kind``: "none", "linear", "llama3" or "yarn"."""

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class ExpertsSpec(msgspec.Struct, frozen=True):
    """A mixture of experts in place of a layer's MLP: each token goes through the ``per_token`` experts of
    ``num_experts`` that its router scores highest, and through a shared expert where there is one."""

    num_experts: int
    per_token: int
    ffn_size: int  # of one expert
    normalised: bool  # the weights of a token's experts are scaled to add up to 1
    shared_ffn_size: int = 0  # of the shared expert; 0: there is none
    shared_gated: bool = False  # the shared expert's output is weighted by a gate of its own
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP of ``ModelSpec.ffn_size`` all the same
    scores: str = "softmax"  # of the router's logits; or "sigmoid", chosen by with a learned correction
    groups: int = 1  # of experts, alike in size; a token's come from ``groups_per_token`` of them
    groups_per_token: int = 1
    scale: float = 1.0  # of the experts' sum
    exact_router: bool = False  # its product is in float32, whatever the type of the weights


class LatentSpec(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values, of all heads, are linear
    in one latent vector of ``rank`` elements, and the part of the keys that is turned by position is the same for all
    heads. The KV array holds these ``rank + rope_dim`` elements."""

    rank: int
    nope_dim: int  # of a head's query and key: the part without position
    rope_dim: int  # and the part that is turned
    value_dim: int
    query_rank: int | None  # of the latent vector that queries are linear in; None: there is none
    scale: float  # of scores
    rope_pairs: bool  # a checkpoint's elements are turned in pairs of neighbours, not of halves


class Shard(msgspec.Struct, frozen=True):
    """Which part of a model this is, where ``ranks`` devices compute it together (tensor parallel)."""

    rank: int = 0
    ranks: int = 1

    def span(self, total: int) -> range:
        """This rank's of ``total`` things in a row; ranks differ by one at most."""
        return range(total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks)


class Fp8Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose matrices are stored in FP8 (e4m3), each with a scale for all of it or for each of its rows."""

    static_inputs: bool  # it brings a scale for each matrix's inputs, too
    kept: tuple[str, ...] = ()  # modules that were left as they had been: names, or "re:" and a regular expression


class ModelSpec(msgspec.Struct, frozen=True):
    """Everything about a decoder's shape. Sizes in elements. Of one rank's part, heads and feed-forward sizes are its
    own (``models.shards``)."""

    architecture: str  # Hugging Face's class name, e.g. "LlamaForCausalLM"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_len: int  # longest sequence it was trained for
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    attn_bias: bool = False  # bias of the output projection
    mlp_bias: bool = False
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    experts: ExpertsSpec | None = None  # None: no layer has any
    latent: LatentSpec | None = None  # then there is one KV head, of ``rank + rope_dim`` elements
    layer_windows: tuple[int | None, ...] | None = None  # where they differ: each layer's, for ``sliding_window``
    fp8: Fp8Checkpoint | None = None  # None: the checkpoint's matrices are not quantised, or its reader undoes that
    transformers_config: str | None = None  # the text of config.json, where transformers' own modules compute the model
    shard: Shard = Shard()

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of one layer, None where it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def head_rows(self) -> range:
        """The tokens whose logits this rank computes: as many for each rank, but for the last."""
        each = -(-self.vocab_size // self.shard.ranks)
        return range(min(each * self.shard.rank, self.vocab_size), min(each * (self.shard.rank + 1), self.vocab_size))

    @property
    def kv_parts(self) -> int:
        """What the KV array holds of a token in a layer: K and V, or one latent vector that stands for both."""
        return 1 if self.latent else 2

    @property
    def kv_elements_per_token(self) -> int:
        """Over all layers."""
        return self.num_layers * self.kv_parts * self.num_kv_heads * self.head_dim


class PoolSpec(msgspec.Struct, frozen=True):
    """The sizes of a pool's arrays (see ``base.batch`` for the token store and block table).

    KV array: ``[num_layers, kv_parts, num_blocks, block_size, num_kv_heads, head_dim]``; the first of two parts is K.
    (A backend may order what a block's part holds in another way: ``kernels.cpu_attention`` does.)
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    kv_dtype: str = "float32"

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-(self.max_model_len + 1) // self.block_size)


class Region(msgspec.Struct, frozen=True):
    """A tensor's place in the memory file of a pool. ``dtype`` is torch's name: "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
