"""The Triton kernels: chunked linear attention over features that are computed where they are used.

One program handles one head and one chunk of C tokens (`outputs_kernel`, `gradients_kernel`), or one head and one block of
value columns (`states_kernel`, which walks the chunks). Features f(Ax + a) are computed from queries and keys in every
kernel that needs them, in float32; only states at chunk boundaries, [B·H, N, F, d + 1], go through memory.

Within a chunk, with A_t the sum of log-gates up to t and documents told apart by a number per token, token s acts on t ≥ s by
exp(A_t − A_s) if both belong to one document; a state reaches the tokens of the document that was going on when it was made.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton: pip install triton") from error

#: Kinds of features: exp, sin, ReLU, elu + 1.
EXP, SIN, RELU, ELU = 0, 1, 2, 3


@triton.jit
def exponents(x, weight, bias, PRECISION: tl.constexpr):
    """Return Ax + a: x [C, K], weight [K, F], bias [F]."""
    return tl.dot(x, weight, input_precision=PRECISION) + bias[None, :]


@triton.jit
def bounded_features(exponent, KIND: tl.constexpr):
    """Return (φ(x), its derivative by the exponent) of [C, F] for the kinds sin, ReLU and elu + 1."""
    if KIND == 1:
        feature = tl.sin(exponent)
        slope = tl.cos(exponent)
    elif KIND == 2:
        feature = tl.maximum(exponent, 0.0)
        slope = tl.where(exponent > 0, 1.0, 0.0)
    else:
        below = tl.exp(tl.minimum(exponent, 0.0))
        feature = tl.where(exponent > 0, exponent + 1.0, below)
        slope = tl.where(exponent > 0, 1.0, below)
    return feature, slope


@triton.jit
def query_features(exponent, used, KIND: tl.constexpr, TOP: tl.constexpr):
    """Return (φ(q), its derivative by the exponent) of [C, F]; ``used`` [F] marks the features that are there."""
    if KIND == 0:
        shown = tl.where(used[None, :], exponent, float("-inf"))
        feature = tl.exp(shown - tl.max(shown, axis=1)[:, None] + TOP)
        slope = feature
    else:
        feature, slope = bounded_features(exponent, KIND)
    return tl.where(used[None, :], feature, 0.0), tl.where(used[None, :], slope, 0.0)


@triton.jit
def key_features(exponent, used, KIND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return (φ(k), its derivative by the exponent), likewise; below LEAST the derivative is left out."""
    if KIND == 0:
        feature = tl.exp(tl.minimum(exponent, MOST))
        slope = tl.where((exponent >= LEAST) & (exponent <= MOST), feature, 0.0)
    else:
        feature, slope = bounded_features(exponent, KIND)
    return tl.where(used[None, :], feature, 0.0), tl.where(used[None, :], slope, 0.0)


@triton.jit
def load_weights(weight_ptr, bias_ptr, head, k, f, d, F):
    """Return Aᵀ [K, F] and a [F] of a head, in float32, zero past their ends."""
    inside = (k[:, None] < d) & (f[None, :] < F)
    weight = tl.load(weight_ptr + head * F * d + f[None, :] * d + k[:, None], mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head * F + f, mask=f < F, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def states_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, document_ptr, start_ptr, states_ptr,
    T, d, F, M, H, N,
    KIND: tl.constexpr, REVERSE: tl.constexpr, HAS_START: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk and after the last, [B·H, N + 1, F, M].

    Forward, of φ(k) and values; in reverse, of φ(q) and the outputs' gradients, where state n is what the chunks after
    n − 1 bring. Documents, log-gates and scales are [B·H, T]; values have M columns, the ones among them.
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % H
    c, k, f = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BF)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    weight, bias = load_weights(weight_ptr, bias_ptr, head, k, f, d, F)
    place = f[:, None] * M + m[None, :]
    inside = (f[:, None] < F) & (m[None, :] < M)
    state = tl.zeros([BF, BM], dtype=tl.float32)
    if HAS_START:
        state += tl.load(start_ptr + row * F * M + place, mask=inside, other=0.0)
    for step in range(N):
        chunk = N - 1 - step if REVERSE else step
        written = chunk + 1 if REVERSE else chunk
        tl.store(states_ptr + (row * (N + 1) + written) * F * M + place, state, mask=inside)
        t = chunk * C + c
        there = t < T
        x = tl.load(x_ptr + (row * T + t)[:, None] * d + k[None, :], mask=there[:, None] & (k[None, :] < d), other=0.0)
        exponent = exponents(x.to(tl.float32), weight, bias, PRECISION)
        if REVERSE:
            feature, _ = query_features(exponent, f < F, KIND, TOP)
        else:
            exponent -= tl.load(norm_ptr + row * T + t, mask=there, other=0.0)[:, None]
            feature, _ = key_features(exponent, f < F, KIND, LEAST, MOST)
        gate = tl.load(gate_ptr + row * T + t, mask=there, other=0.0)
        total = tl.cumsum(gate, axis=0)
        whole = tl.sum(gate, axis=0)
        document = tl.load(document_ptr + row * T + t, mask=there, other=-1)
        last = tl.load(document_ptr + row * T + tl.minimum(chunk * C + C, T) - 1)
        before = tl.load(document_ptr + row * T + tl.maximum(chunk * C - 1, 0))
        if REVERSE:  # a query reads the state of the document that was going on before its chunk
            reach = tl.where(document == before, tl.exp(total), 0.0)
        else:
            reach = tl.where(document == last, tl.exp(whole - total), 0.0)
            reach *= tl.load(scale_ptr + row * T + t, mask=there, other=0.0)
        reach = tl.where(there, reach, 0.0)
        value = tl.load(
            value_ptr + (row * T + t)[:, None] * M + m[None, :], mask=there[:, None] & (m[None, :] < M), other=0.0
        ).to(tl.float32)
        kept = tl.where(last == before, tl.exp(whole), 0.0)
        state = state * kept + tl.dot(tl.trans(feature * reach[:, None]), value, input_precision=PRECISION)
    tl.store(states_ptr + (row * (N + 1) + (0 if REVERSE else N)) * F * M + place, state, mask=inside)


@triton.jit
def outputs_kernel(
    q_ptr, k_ptr, qw_ptr, qb_ptr, kw_ptr, kb_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, document_ptr, states_ptr,
    output_ptr,
    T, d, F, M, H, N,
    KIND: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the numerators and normalisers of one chunk, [B·H, T, M]."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = row % H
    c, k, f, m = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BF), tl.arange(0, BM)
    t = chunk * C + c
    there = t < T
    place = (row * T + t)[:, None] * d + k[None, :]
    inside = there[:, None] & (k[None, :] < d)
    weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
    exponent = exponents(tl.load(q_ptr + place, mask=inside, other=0.0).to(tl.float32), weight, bias, PRECISION)
    query, _ = query_features(exponent, f < F, KIND, TOP)
    weight, bias = load_weights(kw_ptr, kb_ptr, head, k, f, d, F)
    exponent = exponents(tl.load(k_ptr + place, mask=inside, other=0.0).to(tl.float32), weight, bias, PRECISION)
    exponent -= tl.load(norm_ptr + row * T + t, mask=there, other=0.0)[:, None]
    key, _ = key_features(exponent, f < F, KIND, LEAST, MOST)

    total = tl.cumsum(tl.load(gate_ptr + row * T + t, mask=there, other=0.0), axis=0)
    document = tl.load(document_ptr + row * T + t, mask=there, other=-1)
    before = tl.load(document_ptr + row * T + tl.maximum(chunk * C - 1, 0))
    scale = tl.load(scale_ptr + row * T + t, mask=there, other=0.0)
    seen = (c[:, None] >= c[None, :]) & (document[:, None] == document[None, :]) & there[:, None] & there[None, :]
    decay = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay * scale[None, :]
    reach = tl.where(there & (document == before), tl.exp(total), 0.0)

    value_place = (row * T + t)[:, None] * M + m[None, :]
    value_inside = there[:, None] & (m[None, :] < M)
    value = tl.load(value_ptr + value_place, mask=value_inside, other=0.0).to(tl.float32)
    state_place = (row * (N + 1) + chunk) * F * M + f[:, None] * M + m[None, :]
    state = tl.load(states_ptr + state_place, mask=(f[:, None] < F) & (m[None, :] < M), other=0.0)
    output = tl.dot(scores, value, input_precision=PRECISION)
    output += tl.dot(query * reach[:, None], state, input_precision=PRECISION)
    tl.store(output_ptr + value_place, output, mask=value_inside)


@triton.jit
def gradients_kernel(
    q_ptr, k_ptr, qw_ptr, qb_ptr, kw_ptr, kb_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, document_ptr,
    states_ptr, later_ptr, doutput_ptr, dquery_ptr, dkey_ptr, dvalue_ptr, dtotal_ptr, dscale_ptr,
    T, d, F, M, H, N,
    KIND: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one chunk's gradients: of the exponents of queries and keys [B·H, T, F], values, summed log-gates and scales."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = row % H
    c, k, f, m = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BF), tl.arange(0, BM)
    t = chunk * C + c
    there = t < T
    place = (row * T + t)[:, None] * d + k[None, :]
    inside = there[:, None] & (k[None, :] < d)
    weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
    exponent = exponents(tl.load(q_ptr + place, mask=inside, other=0.0).to(tl.float32), weight, bias, PRECISION)
    query, query_slope = query_features(exponent, f < F, KIND, TOP)
    weight, bias = load_weights(kw_ptr, kb_ptr, head, k, f, d, F)
    exponent = exponents(tl.load(k_ptr + place, mask=inside, other=0.0).to(tl.float32), weight, bias, PRECISION)
    exponent -= tl.load(norm_ptr + row * T + t, mask=there, other=0.0)[:, None]
    key, key_slope = key_features(exponent, f < F, KIND, LEAST, MOST)

    gate = tl.load(gate_ptr + row * T + t, mask=there, other=0.0)
    total = tl.cumsum(gate, axis=0)
    whole = tl.sum(gate, axis=0)
    document = tl.load(document_ptr + row * T + t, mask=there, other=-1)
    before = tl.load(document_ptr + row * T + tl.maximum(chunk * C - 1, 0))
    last = tl.load(document_ptr + row * T + tl.minimum(chunk * C + C, T) - 1)
    scale = tl.load(scale_ptr + row * T + t, mask=there, other=0.0)
    seen = (c[:, None] >= c[None, :]) & (document[:, None] == document[None, :]) & there[:, None] & there[None, :]
    decay = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    reach = tl.where(there & (document == before), tl.exp(total), 0.0)
    to_end = tl.where(there & (document == last), tl.exp(whole - total), 0.0)

    value_place = (row * T + t)[:, None] * M + m[None, :]
    value_inside = there[:, None] & (m[None, :] < M)
    value = tl.load(value_ptr + value_place, mask=value_inside, other=0.0).to(tl.float32)
    doutput = tl.load(doutput_ptr + value_place, mask=value_inside, other=0.0)
    state_place = f[:, None] * M + m[None, :]
    state_inside = (f[:, None] < F) & (m[None, :] < M)
    state = tl.load(states_ptr + (row * (N + 1) + chunk) * F * M + state_place, mask=state_inside, other=0.0)
    later = tl.load(later_ptr + (row * (N + 1) + chunk + 1) * F * M + state_place, mask=state_inside, other=0.0)

    dscores = tl.dot(doutput, tl.trans(value), input_precision=PRECISION) * decay
    dquery = tl.dot(dscores * scale[None, :], key, input_precision=PRECISION)
    dquery += tl.dot(doutput, tl.trans(state), input_precision=PRECISION) * reach[:, None]
    dkey = tl.dot(tl.trans(dscores), query, input_precision=PRECISION)
    dkey += tl.dot(value, tl.trans(later), input_precision=PRECISION) * to_end[:, None]
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay
    dvalue = tl.dot(tl.trans(scores), doutput, input_precision=PRECISION)
    dvalue += tl.dot(key, later, input_precision=PRECISION) * to_end[:, None]
    dvalue *= scale[:, None]

    feature_place = (row * T + t)[:, None] * F + f[None, :]
    feature_inside = there[:, None] & (f[None, :] < F)
    dscale = tl.sum(dkey * key, axis=1)
    tl.store(dquery_ptr + feature_place, dquery * query_slope, mask=feature_inside)
    tl.store(dkey_ptr + feature_place, dkey * key_slope * scale[:, None], mask=feature_inside)
    tl.store(dvalue_ptr + value_place, dvalue, mask=value_inside)
    tl.store(dscale_ptr + row * T + t, dscale, mask=there)
    tl.store(dtotal_ptr + row * T + t, tl.sum(dquery * query, axis=1) - dscale * scale, mask=there)


@triton.jit
def step_kernel(
    q_ptr, k_ptr, qw_ptr, qb_ptr, kw_ptr, kb_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, state_ptr, output_ptr,
    d, F, H,
    KIND: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Advance one head by one token: state [B·H, F, d + 1] updated in place, numerator and normaliser [B·H, d + 1] out."""
    row = tl.program_id(0).to(tl.int64)
    head = row % H
    k, f = tl.arange(0, BK), tl.arange(0, BF)
    used = f < F
    one = tl.zeros([1], dtype=tl.float32)
    weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
    x = tl.load(q_ptr + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    exponent = (tl.sum(weight * x[:, None], axis=0) + bias)[None, :] + one[:, None]
    query, _ = query_features(exponent, used, KIND, TOP)
    weight, bias = load_weights(kw_ptr, kb_ptr, head, k, f, d, F)
    x = tl.load(k_ptr + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    exponent = (tl.sum(weight * x[:, None], axis=0) + bias - tl.load(norm_ptr + row))[None, :] + one[:, None]
    key, _ = key_features(exponent, used, KIND, LEAST, MOST)
    key = tl.sum(key, axis=0) * tl.load(scale_ptr + row)
    query = tl.sum(query, axis=0)
    decay = tl.exp(tl.load(gate_ptr + row))

    inside = used[:, None] & (k[None, :] < d)
    place = state_ptr + row * F * (d + 1) + f[:, None] * (d + 1) + k[None, :]
    value = tl.load(value_ptr + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    state = tl.load(place, mask=inside, other=0.0) * decay + key[:, None] * value[None, :]
    tl.store(place, state, mask=inside)
    tl.store(output_ptr + row * (d + 1) + k, tl.sum(state * query[:, None], axis=0), mask=k < d)
    place = state_ptr + row * F * (d + 1) + f * (d + 1) + d
    mass = tl.load(place, mask=used, other=0.0) * decay + key
    tl.store(place, mass, mask=used)
    tl.store(output_ptr + row * (d + 1) + d, tl.sum(mass * query, axis=0))
