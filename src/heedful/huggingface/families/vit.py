"""ViT: norms before, one row of patches read both ways."""

from .family import Family, Place, Projections

FAMILY = Family(
    blocks="layers",
    attention="attention",
    q=Place("attention.q_proj"),
    k=Place("attention.k_proj"),
    v=Place("attention.v_proj"),
    o=Place("attention.o_proj"),
    up=Place("mlp.fc1"),
    down=Place("mlp.fc2"),
    norms=("layernorm_before", "layernorm_after"),
    pre=True,
    activation="hidden_act",
    final="layernorm",
)

ATTENTIONS = (
    Projections(
        kinds=("ViTAttention",),
        q=Place("q_proj"),
        k=Place("k_proj"),
        v=Place("v_proj"),
        o=Place("o_proj"),
        size="head_dim",
    ),
)
