"""The Triton kernels: chunked linear attention over features that are computed where they are used.

One program handles one head and one chunk of C tokens (`outputs_kernel`, `gradients_kernel`), or one head and one block of
features and value columns (`states_kernel`, which walks the chunks). Features f(Ax + a) are computed from queries and keys in
every kernel that needs them, in float32 and a block of them at a time, so that what a program holds fits a GPU's shared
memory; only states at chunk boundaries, [B·H, N, F, d], and their normalisers' [B·H, N, F] go through memory.

Within a chunk, with A_t the sum of log-gates up to t and documents told apart by a number per token, token s acts on t ≥ s by
exp(A_t − A_s) if both belong to one document; a state reaches the tokens of the document that was going on when it was made.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton: pip install triton") from error

#: Of a kernel that is compiled once for all numbers of tokens and chunks.
LENGTHS_ALIKE = triton.jit(do_not_specialize=("T", "N"))


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
def query_features(exponent, top, used, KIND: tl.constexpr, TOP: tl.constexpr):
    """Return (φ(q), its derivative by the exponent) of [C, F]; ``top`` [C]: largest exponents, ``used`` [F]: those there."""
    if KIND == 0:
        feature = tl.exp(tl.where(used[None, :], exponent, float("-inf")) - top[:, None] + TOP)
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
def load_rows(x_ptr, start, there, t, k, width):
    """Return rows t of [T, width] from a place on, in float32: zero where they are not ``there`` and past their ends."""
    inside = there[:, None] & (k[None, :] < width)
    return tl.load(x_ptr + (start + t)[:, None] * width + k[None, :], mask=inside, other=0.0).to(tl.float32)


@LENGTHS_ALIKE
def states_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, top_ptr, value_ptr, mass_ptr, gate_ptr, scale_ptr, document_ptr,
    start_ptr, start_masses_ptr, states_ptr, masses_ptr,
    T, d, F, H, N,
    KIND: tl.constexpr, REVERSE: tl.constexpr, HAS_START: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk and after the last, [B·H, N + 1, F, d], and its normaliser's, [B·H, N + 1, F].

    Forward, of φ(k) and values, and ones for the normaliser; in reverse, of φ(q) and the gradients of numerators and
    normalisers, where state n is what the chunks after n − 1 bring. Documents, log-gates and scales are [B·H, T].
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % H
    c, k = tl.arange(0, C), tl.arange(0, BK)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    weight, bias = load_weights(weight_ptr, bias_ptr, head, k, f, d, F)
    place = f[:, None] * d + v[None, :]
    inside = (f[:, None] < F) & (v[None, :] < d)
    first = f < tl.where(tl.program_id(2) == 0, F, 0)  # one program of those of the same features writes the normaliser
    state = tl.zeros([BF, BV], dtype=tl.float32)
    mass = tl.zeros([BF], dtype=tl.float32)
    if HAS_START:
        state += tl.load(start_ptr + row * F * d + place, mask=inside, other=0.0)
        mass += tl.load(start_masses_ptr + row * F + f, mask=first, other=0.0)
    for step in range(N):
        chunk = N - 1 - step if REVERSE else step
        written = row * (N + 1) + (chunk + 1 if REVERSE else chunk)
        tl.store(states_ptr + written * F * d + place, state, mask=inside)
        tl.store(masses_ptr + written * F + f, mass, mask=first)
        t = chunk * C + c
        there = t < T
        x = load_rows(x_ptr, row * T, there, t, k, d)
        exponent = exponents(x, weight, bias, PRECISION)
        if REVERSE:
            top = tl.load(top_ptr + row * T + t, mask=there, other=0.0)
            feature, _ = query_features(exponent, top, f < F, KIND, TOP)
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
            share = tl.load(mass_ptr + row * T + t, mask=there, other=0.0)
        else:
            reach = tl.where(document == last, tl.exp(whole - total), 0.0)
            reach *= tl.load(scale_ptr + row * T + t, mask=there, other=0.0)
            share = tl.full([C], 1.0, dtype=tl.float32)
        feature *= tl.where(there, reach, 0.0)[:, None]
        value = load_rows(value_ptr, row * T, there, t, v, d)
        kept = tl.where(last == before, tl.exp(whole), 0.0)
        state = state * kept + tl.dot(tl.trans(feature), value, input_precision=PRECISION)
        mass = mass * kept + tl.sum(feature * share[:, None], axis=0)
    written = row * (N + 1) + (0 if REVERSE else N)
    tl.store(states_ptr + written * F * d + place, state, mask=inside)
    tl.store(masses_ptr + written * F + f, mass, mask=first)


@LENGTHS_ALIKE
def outputs_kernel(
    q_ptr, k_ptr, qw_ptr, qb_ptr, kw_ptr, kb_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, document_ptr,
    states_ptr, masses_ptr, output_ptr, output_mass_ptr, top_ptr,
    T, d, F, H, N,
    KIND: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one chunk's numerators [B·H, T, d], normalisers and the queries' largest exponents, [B·H, T] each."""
    chunk, row = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    head = row % H
    c, k = tl.arange(0, C), tl.arange(0, BK)
    t = chunk * C + c
    there = t < T
    q, x = load_rows(q_ptr, row * T, there, t, k, d), load_rows(k_ptr, row * T, there, t, k, d)
    norm = tl.load(norm_ptr + row * T + t, mask=there, other=0.0)
    total = tl.cumsum(tl.load(gate_ptr + row * T + t, mask=there, other=0.0), axis=0)
    document = tl.load(document_ptr + row * T + t, mask=there, other=-1)
    before = tl.load(document_ptr + row * T + tl.maximum(chunk * C - 1, 0))
    reach = tl.where(there & (document == before), tl.exp(total), 0.0)

    top = tl.zeros([C], dtype=tl.float32)
    if KIND == 0:
        top += float("-inf")
        for block in range(0, F, BF):
            f = block + tl.arange(0, BF)
            weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
            shown = tl.where((f < F)[None, :], exponents(q, weight, bias, PRECISION), float("-inf"))
            top = tl.maximum(top, tl.max(shown, axis=1))
        tl.store(top_ptr + row * T + t, top, mask=there)

    scores = tl.zeros([C, C], dtype=tl.float32)
    output = tl.zeros([C, BK], dtype=tl.float32)
    mass = tl.zeros([C], dtype=tl.float32)
    for block in range(0, F, BF):
        f = block + tl.arange(0, BF)
        used = f < F
        weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
        query, _ = query_features(exponents(q, weight, bias, PRECISION), top, used, KIND, TOP)
        weight, bias = load_weights(kw_ptr, kb_ptr, head, k, f, d, F)
        key, _ = key_features(exponents(x, weight, bias, PRECISION) - norm[:, None], used, KIND, LEAST, MOST)
        scores += tl.dot(query, tl.trans(key), input_precision=PRECISION)
        query *= reach[:, None]
        state_row = row * (N + 1) + chunk
        state = load_rows(states_ptr, state_row * F, used, f, k, d)
        output += tl.dot(query, state, input_precision=PRECISION)
        state_mass = tl.load(masses_ptr + state_row * F + f, mask=used, other=0.0)
        mass += tl.sum(query * state_mass[None, :], axis=1)

    scale = tl.load(scale_ptr + row * T + t, mask=there, other=0.0)
    seen = (c[:, None] >= c[None, :]) & (document[:, None] == document[None, :]) & there[:, None] & there[None, :]
    decay = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    scores *= decay * scale[None, :]
    output += tl.dot(scores, load_rows(value_ptr, row * T, there, t, k, d), input_precision=PRECISION)
    mass += tl.sum(scores, axis=1)
    tl.store(output_ptr + (row * T + t)[:, None] * d + k[None, :], output, mask=there[:, None] & (k[None, :] < d))
    tl.store(output_mass_ptr + row * T + t, mass, mask=there)


@LENGTHS_ALIKE
def gradients_kernel(
    q_ptr, k_ptr, qw_ptr, qb_ptr, kw_ptr, kb_ptr, norm_ptr, value_ptr, gate_ptr, scale_ptr, document_ptr, top_ptr,
    states_ptr, masses_ptr, later_ptr, later_masses_ptr, doutput_ptr, dmass_ptr,
    dquery_ptr, dkey_ptr, dvalue_ptr, dtotal_ptr, dscale_ptr,
    T, d, F, H, N,
    KIND: tl.constexpr,
    TOP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one chunk's gradients: of the exponents of queries and keys [B·H, T, F], values, summed log-gates and scales."""
    chunk, row = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    head = row % H
    c, k = tl.arange(0, C), tl.arange(0, BK)
    t = chunk * C + c
    there = t < T
    q, x = load_rows(q_ptr, row * T, there, t, k, d), load_rows(k_ptr, row * T, there, t, k, d)
    value, doutput = load_rows(value_ptr, row * T, there, t, k, d), load_rows(doutput_ptr, row * T, there, t, k, d)
    dmass = tl.load(dmass_ptr + row * T + t, mask=there, other=0.0)
    top = tl.load(top_ptr + row * T + t, mask=there, other=0.0)
    norm = tl.load(norm_ptr + row * T + t, mask=there, other=0.0)
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

    dscores = (tl.dot(doutput, tl.trans(value), input_precision=PRECISION) + dmass[:, None]) * decay
    scores = tl.zeros([C, C], dtype=tl.float32)
    dvalue = tl.zeros([C, BK], dtype=tl.float32)
    dscale = tl.zeros([C], dtype=tl.float32)
    dtotal = tl.zeros([C], dtype=tl.float32)
    for block in range(0, F, BF):
        f = block + tl.arange(0, BF)
        used = f < F
        weight, bias = load_weights(qw_ptr, qb_ptr, head, k, f, d, F)
        query, query_slope = query_features(exponents(q, weight, bias, PRECISION), top, used, KIND, TOP)
        weight, bias = load_weights(kw_ptr, kb_ptr, head, k, f, d, F)
        key, key_slope = key_features(exponents(x, weight, bias, PRECISION) - norm[:, None], used, KIND, LEAST, MOST)
        scores += tl.dot(query, tl.trans(key), input_precision=PRECISION)

        here = row * (N + 1) + chunk
        state = load_rows(states_ptr, here * F, used, f, k, d)
        mass = tl.load(masses_ptr + here * F + f, mask=used, other=0.0)
        dquery = tl.dot(doutput, tl.trans(state), input_precision=PRECISION) + dmass[:, None] * mass[None, :]
        dquery = dquery * reach[:, None] + tl.dot(dscores * scale[None, :], key, input_precision=PRECISION)

        later = load_rows(later_ptr, (here + 1) * F, used, f, k, d)
        mass = tl.load(later_masses_ptr + (here + 1) * F + f, mask=used, other=0.0)
        dkey = tl.dot(value, tl.trans(later), input_precision=PRECISION) + mass[None, :]
        dkey = dkey * to_end[:, None] + tl.dot(tl.trans(dscores), query, input_precision=PRECISION)
        dvalue += tl.dot(key * to_end[:, None], later, input_precision=PRECISION)

        place = (row * T + t)[:, None] * F + f[None, :]
        inside = there[:, None] & used[None, :]
        tl.store(dquery_ptr + place, dquery * query_slope, mask=inside)
        tl.store(dkey_ptr + place, dkey * key_slope * scale[:, None], mask=inside)
        dtotal += tl.sum(dquery * query, axis=1)
        dscale += tl.sum(dkey * key, axis=1)
    dvalue += tl.dot(tl.trans(scores * decay), doutput, input_precision=PRECISION)
    dvalue *= scale[:, None]
    tl.store(dvalue_ptr + (row * T + t)[:, None] * d + k[None, :], dvalue, mask=there[:, None] & (k[None, :] < d))
    tl.store(dscale_ptr + row * T + t, dscale, mask=there)
    tl.store(dtotal_ptr + row * T + t, dtotal - dscale * scale, mask=there)


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
    top = tl.max(tl.where(used[None, :], exponent, float("-inf")), axis=1)
    query, _ = query_features(exponent, top, used, KIND, TOP)
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
