"""Training steps in JAX, lowered to text: an MLP, a transformer, a convolutional network."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WIDTH, HEADS, LAYERS, VOCABULARY, FEED, LENGTH = 64, 4, 2, 100, 256, 16
MLP_WIDTHS = (16, 64, 48, 10)


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def picked(scores: Any, labels: Any) -> Any:
    """Returns the mean negative logarithm of the likelihood of labels."""
    rows = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(rows, labels[..., None], -1))


def mlp_loss(params: Any, x: Any, y: Any) -> Any:
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = params[-1]
    return picked(x @ weight + bias, y)


def sgd_step(loss: Callable[..., Any], *, shows_loss: bool = True) -> Callable[..., Any]:
    def step(params: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (new, value) if shows_loss else new

    return step


def clipped_momentum(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, velocity: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        share = jnp.minimum(1.0, 1.0 / norm)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g * share, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    return step


def adam_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, m: Any, v: Any, count: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, grads)
        count = count + 1

        def new(p: Any, m: Any, v: Any) -> Any:
            return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)

        return jax.tree.map(new, params, m, v), m, v, count, value

    return step


def mlp_params(widths: tuple[int, ...] = MLP_WIDTHS) -> list[Any]:
    pairs = itertools.pairwise(widths)
    return [(array(a, b), array(b)) for a, b in pairs]


def mlp(batch: int = 8, widths: tuple[int, ...] = MLP_WIDTHS) -> Any:
    data = array(batch, widths[0]), array(batch, dtype=jnp.int32)
    return jax.jit(sgd_step(mlp_loss), donate_argnums=0).lower(mlp_params(widths), *data)


# a transformer, as GPT's


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def _block(x: Any, p: Any) -> Any:
    batch, length, width = x.shape
    h = _norm(x, p["g1"], p["b1"])
    q, k, v = ((h @ p[n]).reshape(batch, length, HEADS, width // HEADS) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4.0
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    seen = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + seen.reshape(batch, length, width) @ p["o"]
    h = _norm(x, p["g2"], p["b2"])
    return x + jax.nn.gelu(h @ p["w1"] + p["c1"]) @ p["w2"] + p["c2"]


def gpt_loss(params: Any, tokens: Any, *, scan: bool = False) -> Any:
    x = params["emb"][tokens] + params["pos"][None]
    if scan:
        x, _ = lax.scan(lambda x, p: (_block(x, p), None), x, params["blocks"])
    else:
        for p in params["blocks"]:
            x = _block(x, p)
    return picked(x @ params["head"], jnp.roll(tokens, -1, 1))


def gpt_params(*, scan: bool = False) -> dict[str, Any]:
    row, square = array(WIDTH), array(WIDTH, WIDTH)
    block = {name: row for name in ("g1", "b1", "g2", "b2", "c2")}
    block |= {name: square for name in "qkvo"}
    block |= {"w1": array(WIDTH, FEED), "c1": array(FEED), "w2": array(FEED, WIDTH)}
    blocks = jax.tree.map(lambda leaf: array(LAYERS, *leaf.shape), block) if scan else None
    return {
        "emb": array(VOCABULARY, WIDTH), "pos": array(LENGTH, WIDTH),
        "head": array(WIDTH, VOCABULARY), "blocks": blocks or [block] * LAYERS,
    }  # fmt: skip


@cache
def gpt(batch: int = 6, *, scan: bool = False, adam: bool = False) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        return gpt_loss(params, tokens, scan=scan)

    params, tokens = gpt_params(scan=scan), array(batch, LENGTH, dtype=jnp.int32)
    if adam:
        return jax.jit(adam_step(loss)).lower(params, params, params, array(), tokens)
    return jax.jit(sgd_step(loss)).lower(params, tokens)


# convolutions


def _convolved(x: Any, weight: Any, stride: int = 1) -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=names)


def cnn_loss(params: Any, x: Any, y: Any) -> Any:
    x = jax.nn.relu(_convolved(x, params[0]))
    x = jax.nn.relu(_convolved(x, params[1], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean((x.reshape(x.shape[0], -1) @ params[2] - y) ** 2)


def cnn(batch: int = 4) -> Any:
    params = [array(3, 3, 3, 16), array(3, 3, 16, 32), array(2048, 10)]
    data = array(batch, 32, 32, 3), array(batch, 10)
    return jax.jit(sgd_step(cnn_loss)).lower(params, *data)


def contrastive(batch: int = 8) -> Any:
    """Returns a step whose scores compare every sample with every other."""

    def loss(params: Any, x: Any) -> Any:
        rows = x @ params
        return jnp.mean(jax.nn.log_softmax(rows @ rows.T))

    return jax.jit(sgd_step(loss)).lower(array(16, 32), array(batch, 16))
