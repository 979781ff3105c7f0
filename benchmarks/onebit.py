"""Error and milliseconds of one-bit messages against d, s and n, of a whole communication, and at full size.

    python benchmarks/onebit.py [--draws 5] [--decoder gpsp] [--full 2] [--phi srht] [--memory-mib 256]
    python benchmarks/onebit.py --authors FOLDER

Vectors have s nonzeros, uniform on +-[0.5, 2]. An error is the median of ||z - w|| / ||w||; times are CPU
time of this process, ``draw`` what a matrix costs where none is kept; the last error is that of a Hadamard
transform in the matrix's place. ``--full`` decodes that many messages of different owners at n = 20958,
d = 10479, s = 100 (``--phi srht``: at a million, d = 5000, too) and reports the peak memory, which does not
grow with their number. The last lines are messages with flipped signs. ``--authors`` decodes the same signs
with the authors' GPSP.m, which lies in that folder, in Octave (``octave-cli``), matrix in memory, both sizes
of the paper, the second of two runs each. Set OMP_NUM_THREADS=1.
"""

import argparse
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from reports import report

from hedgerow.wire.onebit import OneBit, gpsp
from hedgerow.wire.sensing import GaussianSensing, shared_sensing
from hedgerow.wire.vector_codecs import Sparse

GRID = (
    *((1000, 10, d) for d in (150, 250, 400, 500, 1000, 2000)),
    *((1000, s, 500) for s in (2, 5, 20, 30)),
    *((n, 10, 500) for n in (300, 3000, 10000)),
)


def sparse_vector(rng: np.random.Generator, n: int, s: int) -> NDArray[np.float64]:
    w = np.zeros(n)
    w[rng.choice(n, s, replace=False)] = rng.uniform(0.5, 2, s) * rng.choice([-1, 1], s)
    return w


def error(z: NDArray[np.float64] | None, w: NDArray[np.float64]) -> float:
    return 1.0 if z is None else float(np.linalg.norm(z - w) / np.linalg.norm(w))


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def recovery(n: int, s: int, d: int, draws: int, decoder: str) -> str:
    consistent = OneBit(s, d, decoder=decoder)
    codecs = (consistent, replace(consistent, expand="literal"), replace(consistent, compand="none"))
    transform = replace(consistent, phi="srht")
    errors: list[list[float]] = [[], [], [], []]
    drawing, encoding, decoding, exact = [], [], [], 0
    for draw in range(draws):
        w = sparse_vector(np.random.default_rng([draw, n, s, d]), n, s)
        phi = GaussianSensing((draw,), d, n)
        drawing.append(cpu_seconds(lambda phi=phi: phi.rmatvec(np.zeros(phi.d))))
        encoding.append(cpu_seconds(lambda phi=phi, w=w: consistent.encode_with(phi, w)))
        payloads = [codec.encode_with(phi, w) for codec in codecs]
        decoding.append(cpu_seconds(lambda phi=phi, p=payloads[0]: consistent.decode_with(phi, p)))
        decoded = [codec.decode_with(phi, p) for codec, p in zip(codecs, payloads, strict=True)]
        decoded.append(transform.decode(transform.encode(w, (draw,)), n, (draw,)))
        for found, z in zip(errors, decoded, strict=True):
            found.append(error(z, w))
        exact += decoded[0] is not None and np.array_equal(np.flatnonzero(decoded[0]), np.flatnonzero(w))
    medians = "".join(f"{np.median(found):>11.4f}" for found in errors)
    times = "".join(f"{1000 * np.median(each):>8.2f}" for each in (drawing, encoding, decoding))
    bits = f"{consistent.bits(n):>7} {Sparse(s, 32).bits(n):>8}"
    return f"{n:>6} {s:>4} {d:>5}{medians} {100 * exact / draws:>7.0f} %{times} {bits}"


def communication(nodes: int = 128, requesters: int = 16) -> None:
    """One iteration in one process: each node's message is decoded by sixteen others."""
    codec, rng = OneBit(10, 500), np.random.default_rng(0)
    vectors = [sparse_vector(rng, 1000, 10) for _ in range(nodes)]
    seeds = [(0, node) for node in range(nodes)]
    payloads: list[bytes] = []
    encoding = cpu_seconds(lambda: payloads.extend(map(codec.encode, vectors, seeds)))
    once = cpu_seconds(lambda: codec.decode_many(payloads * requesters, 1000, seeds * requesters))
    each = cpu_seconds(lambda: [codec.decode(p, 1000, s) for p, s in zip(payloads, seeds, strict=True)])
    print(
        f"\n{nodes} nodes, {nodes * requesters} decodes, n = 1000, s = 10, d = 500: draw and encode "
        f"{encoding:.2f} s; decode_many {once:.2f} s; one by one {each * requesters:.2f} s"
    )
    what = f"{nodes * requesters} decodes, n = 1000, d = 500"
    report(what, once, "s", each * requesters / once, "one by one")


def noisy(draws: int) -> None:
    """What flipped signs cost and leave, and signs that are no vector's: what a lying node can send."""
    n, s, d = 1000, 10, 500
    print(f"\nn = {n}, s = {s}, d = {d}: median error, milliseconds a message (longest)")
    for flipped in (0.0, 0.002, 0.01, 0.05, 0.1, None):
        line = "random signs" if flipped is None else f"{100 * flipped:g} % flipped"
        for decoder in ("gpsp", "biht"):
            codec, errors, times = OneBit(s, d, decoder=decoder), [], []
            for draw in range(draws):
                rng, phi = np.random.default_rng([draw, n, s, d]), GaussianSensing((draw,), d, n)
                w = sparse_vector(rng, n, s)
                payload = codec.encode_with(phi, w)
                flips = rng.random(d) < 0.5 if flipped is None else np.arange(d) < flipped * d
                mask = np.packbits(rng.permutation(flips))
                sent = payload[:8] + (np.frombuffer(payload, np.uint8, offset=8) ^ mask).tobytes()
                phi.rmatvec(np.zeros(d))
                found: list[NDArray[np.float64] | None] = []
                times.append(
                    1000
                    * cpu_seconds(lambda c=codec, phi=phi, p=sent, f=found: f.append(c.decode_with(phi, p)))
                )
                errors.append(error(found[0], w))
            line += f"   {decoder} {np.median(errors):.4f}, {np.median(times):6.2f} ({max(times):6.2f})"
        print(line, flush=True)


def full_size(n: int, d: int, phi_kind: str, messages: int, memory_limit: int) -> None:
    s = 100
    codec, rng = OneBit(s, d, phi=phi_kind, memory_limit=memory_limit), np.random.default_rng(0)
    print(f"\nn = {n}, s = {s}, d = {d}, {phi_kind}, {memory_limit / 2**20:.0f} MiB of matrices kept")
    for message in range(messages):
        w, seed = sparse_vector(rng, n, s), (0, message)
        payload: list[bytes] = []
        encoding = cpu_seconds(lambda w=w, seed=seed, into=payload: into.append(codec.encode(w, seed)))
        phi = shared_sensing(seed, d, n, 1.0, memory_limit, kind=phi_kind)
        drawing = cpu_seconds(lambda phi=phi: phi.rmatvec(np.zeros(phi.d)))
        decoded: list[NDArray[np.float64] | None] = []
        decoding = cpu_seconds(
            lambda p=payload[0], seed=seed, into=decoded: into.append(codec.decode(p, n, seed))
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(
            f"message {message}: encode {encoding:.2f} s, first pass {drawing:.1f} s, "
            f"decode {decoding:.1f} s, error {error(decoded[0], w):.4f}, peak memory {peak:.0f} MiB",
            flush=True,
        )
        report(f"a message decoded, n = {n}, d = {d}, {phi_kind}, {peak:.0f} MiB", decoding, "s")


# Octave 7 has no maxk; reading the matrix is not timed.
IN_OCTAVE = """
function [v, i] = maxk(x, k)
  [v, i] = sort(x, 'descend'); v = v(1:k); i = i(1:k);
end
f = fopen('A'); A = fread(f, [{d} {n}], 'single'); fclose(f);
f = fopen('c'); c = fread(f, {d}, 'double'); fclose(f);
for again = 1:2
  start = cputime(); evalc('out = GPSP(A, c, {s}, 0);'); spent = cputime() - start;
end
f = fopen('x', 'w'); fwrite(f, [out.x; spent], 'double'); fclose(f);
"""


def beside_the_authors(authors: Path, memory_limit: int) -> None:
    for n, s, d in ((1000, 10, 500), (20_958, 100, 10_479)):
        w = sparse_vector(np.random.default_rng(0), n, s)
        direction, support = w / np.linalg.norm(w), np.flatnonzero(w)
        in_memory = GaussianSensing((0,), d, n, memory_limit=4 * d * n)
        signs = np.where(in_memory.columns(support) @ w[support] >= 0, 1.0, -1.0)
        print(f"\nn = {n}, s = {s}, d = {d}: seconds, error")
        spent = {}
        for kept, phi in (
            ("all in memory", in_memory),
            (f"{memory_limit / 2**20:.0f} MiB kept", GaussianSensing((0,), d, n, memory_limit=memory_limit)),
        ):
            phi.rmatvec(signs)
            found = gpsp(phi, signs, s)
            spent[kept] = cpu_seconds(lambda phi=phi, signs=signs, s=s: gpsp(phi, signs, s))
            print(
                f"{kept:>14} {spent[kept]:8.3f} {np.linalg.norm(found.vector - direction):8.4f}", flush=True
            )
        with tempfile.TemporaryDirectory() as folder:
            in_memory.columns(np.arange(n)).T.astype(np.float32).tofile(Path(folder, "A"))
            signs.tofile(Path(folder, "c"))
            program = f"addpath('{authors.resolve()}');{IN_OCTAVE.format(n=n, s=s, d=d)}"
            # Octave's exit status is 1 here and there after all went well.
            ran = subprocess.run(
                ["octave-cli", "--quiet", "--eval", program],
                check=False,
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if not Path(folder, "x").is_file():
                raise SystemExit(f"GPSP.m did not run in Octave: {ran.stderr}")
            *x, theirs = np.fromfile(Path(folder, "x"))
        print(f"{'GPSP.m':>14} {theirs:8.3f} {np.linalg.norm(x - direction):8.4f}", flush=True)
        for kept, ours in spent.items():
            report(f"a decoding, n = {n}, d = {d}, {kept}", ours, "s", theirs / ours, "GPSP.m in Octave")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--decoder", default="gpsp", choices=("gpsp", "biht"))
    parser.add_argument("--full", type=int, default=0, metavar="MESSAGES")
    parser.add_argument("--phi", default="gaussian", choices=("gaussian", "srht"))
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--authors", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.authors:
        beside_the_authors(options.authors, options.memory_mib * 2**20)
        return
    if options.full:
        sizes = ((20_958, 10_479), (10**6, 5_000))[: 1 if options.phi == "gaussian" else 2]
        for n, d in sizes:
            full_size(n, d, options.phi, options.full, options.memory_mib * 2**20)
        return
    print(
        f"{'n':>6} {'s':>4} {'d':>5}{'consistent':>11}{'literal':>11}{'no compand':>11}"
        f"{'srht':>11} {'support':>9}"
        f"{'draw':>8}{'encode':>8}{'decode':>8} {'bits':>7} {'sparse32':>8}"
    )
    for n, s, d in GRID:
        print(recovery(n, s, d, options.draws, options.decoder), flush=True)
    communication()
    noisy(4 * options.draws)


if __name__ == "__main__":
    main()
