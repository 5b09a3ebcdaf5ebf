"""DeepSeek-V3 and its family: latent attention, many small experts and shared ones.

    size    what                      router                           balance
    671b    DeepSeek-V3               sigmoid, 4 of 8 groups           bias, and a loss a sequence
    16b     DeepSeek-V2-Lite          softmax, not renormalised        loss a sequence
    236b    DeepSeek-V2               softmax, 3 of 8 groups           loss a sequence
    16b-a3b Moonlight                 sigmoid                          bias, and a loss a sequence

DeepSeek-V3's head for predicting a second token (multi-token prediction) is left out: 671b is the
671.03 B of the main model. DeepSeek-V2's losses for devices and communication are left out too.

Sources: DeepSeek-V3, arXiv:2412.19437; DeepSeek-V2, arXiv:2405.04434; Moonlight, arXiv:2502.16982;
the released configurations.
"""

from typing import Any

from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec

_HEADS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "nope_head_dim": 128,
    "rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_eps": 1e-6,
}
_EXTENDED: dict[str, Any] = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_context": 4096,
}
_LOSS_FREE: dict[str, Any] = {
    "router": "sigmoid",
    "renormalize": True,
    "bias_speed": 0.001,
    "balance": "sequence",
    "balance_coefficient": 0.0001,
}
_BY_LOSS: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.003}

SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        ffn_dim=256,
        kv_lora_rank=32,
        q_lora_rank=48,
        nope_head_dim=32,
        rope_head_dim=16,
        v_head_dim=32,
        norm_eps=1e-6,
        n_experts=16,
        experts_per_token=4,
        expert_dim=48,
        first_dense_layers=1,
        n_shared_experts=1,
        n_groups=4,
        top_groups=2,
        routed_scaling=2.5,
        **_LOSS_FREE,
    ),
    "16b": DecoderConfig(
        vocab_size=102400,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=10944,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        first_dense_layers=1,
        n_shared_experts=2,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
        **_HEADS,
        **_EXTENDED,
        **{**_BY_LOSS, "balance_coefficient": 0.001},
    ),
    "16b-a3b": DecoderConfig(
        vocab_size=163840,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=11264,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        first_dense_layers=1,
        n_shared_experts=2,
        routed_scaling=2.446,
        rope_theta=50000.0,
        **{**_HEADS, "norm_eps": 1e-5},
        **_LOSS_FREE,
    ),
    "236b": DecoderConfig(
        vocab_size=102400,
        dim=5120,
        n_layers=60,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=12288,
        q_lora_rank=1536,
        n_experts=160,
        experts_per_token=6,
        expert_dim=1536,
        first_dense_layers=1,
        n_shared_experts=2,
        n_groups=8,
        top_groups=3,
        routed_scaling=16.0,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
        **_HEADS,
        **_EXTENDED,
        **_BY_LOSS,
    ),
    "671b": DecoderConfig(
        vocab_size=129280,
        dim=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=18432,
        q_lora_rank=1536,
        n_experts=256,
        experts_per_token=8,
        expert_dim=2048,
        first_dense_layers=3,
        n_shared_experts=1,
        n_groups=8,
        top_groups=4,
        routed_scaling=2.5,
        rope_mscale=1.0,
        rope_mscale_all_dim=1.0,
        **_HEADS,
        **_EXTENDED,
        **_LOSS_FREE,
    ),
}

DEEPSEEK_V3 = ModelSpec("deepseek_v3", SIZES)
