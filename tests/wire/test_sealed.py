"""Sealed links: who reads what, what is refused and why, and keys and pins in files."""

import base64
import os
import stat
from itertools import permutations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.wire import SEAL_BYTES, PayloadError, SealingKey
from hedgerow.wire.sealed import INTRODUCTION_BYTES, KEY_BYTES, Link, Links, NodeIdentity, _agreed, read_pins


def someone() -> NodeIdentity:
    return NodeIdentity(SealingKey.drawn(), SealingKey.drawn())


def ends(run: str = "1") -> tuple[Link, Link]:
    a, b = someone(), someone()
    return (
        Link(a.secret_with(b.introduction), run, "a", "b"),
        Link(b.secret_with(a.introduction), run, "b", "a"),
    )


A, B = ends()


@given(contents=st.binary(max_size=200), iteration=st.integers(0, 2**63))
def test_what_one_end_seals_the_other_opens(contents: bytes, iteration: int) -> None:
    sealed = A.seal(contents, iteration, "payload")
    assert B.open(sealed, iteration, "payload") == contents
    assert len(sealed) == len(contents) + SEAL_BYTES


@given(at=st.integers(0, 7 + SEAL_BYTES), bit=st.integers(0, 7))
def test_one_bit_that_is_altered_is_noticed(at: int, bit: int) -> None:
    sealed = bytearray(A.seal(b"contents", 3, "payload"))
    sealed[at] ^= 1 << bit
    with pytest.raises(PayloadError, match="altered or replayed"):
        B.open(bytes(sealed), 3, "payload")


@pytest.mark.parametrize("sealed", [b"", b"short", b"\0" * (SEAL_BYTES - 1), b"\0" * 100])
def test_what_was_never_sealed_does_not_open(sealed: bytes) -> None:
    with pytest.raises(PayloadError, match="altered or replayed"):
        B.open(sealed, 3, "payload")


def test_the_secret_is_the_triple_diffie_hellman_that_each_end_finds_by_itself() -> None:
    # By hand, with the library's functions alone.
    a, b = sorted((someone(), someone()), key=lambda one: one.introduction)

    def dh(own: SealingKey, theirs: SealingKey) -> bytes:
        public = X25519PublicKey.from_public_bytes(theirs.public)
        return X25519PrivateKey.from_private_bytes(own.private).exchange(public)

    parts = dh(a.key, b.session) + dh(a.session, b.key) + dh(a.session, b.session)
    info = b"hedgerow sealed link 1" + a.introduction + b.introduction
    expected = HKDF(SHA256(), 32, None, info).derive(parts)
    for own, other in ((a, b), (b, a)):
        _agreed.cache_clear()
        assert own.secret_with(other.introduction) == expected


def test_one_process_that_plays_all_nodes_agrees_once_for_both_ends() -> None:
    nodes = [someone() for _ in range(5)]
    _agreed.cache_clear()
    for one, other in [*permutations(nodes, 2)] * 3:
        assert one.secret_with(other.introduction) == other.secret_with(one.introduction)
    assert _agreed.cache_info().misses == 10


def test_who_holds_neither_key_of_a_pair_finds_another_secret() -> None:
    a, b, thief = someone(), someone(), someone()
    secret = a.secret_with(b.introduction)
    assert secret not in (thief.secret_with(a.introduction), thief.secret_with(b.introduction))
    # Public keys alone make nobody an end: an identity is private keys.
    assert NodeIdentity(thief.key, a.session).secret_with(b.introduction) != secret


def test_a_message_opens_where_it_belongs_alone() -> None:
    a, b, c = someone(), someone(), someone()
    sealed = Link(a.secret_with(b.introduction), "1", "a", "b").seal(b"contents", 3, "payload")
    secret, to_a = b.secret_with(a.introduction), a.introduction
    # A server may use a run's id twice, and a key may leak later: keys of the run are new ones.
    long_lived = NodeIdentity(b.key, SealingKey.drawn())
    elsewhere = [
        (Link(secret, "1", "b", "a"), 4, "payload"),  # Replayed at another iteration.
        (Link(secret, "1", "b", "a"), 3, "seed"),
        (Link(secret, "2", "b", "a"), 3, "payload"),  # In another run.
        (Link(secret, "1", "a", "b"), 3, "payload"),  # Sent back.
        (Link(secret, "1", "b", "c"), 3, "payload"),  # Under another sender's name.
        (Link(c.secret_with(to_a), "1", "b", "a"), 3, "payload"),
        (Link(b.secret_with(c.introduction), "1", "b", "a"), 3, "payload"),
        (Link(long_lived.secret_with(to_a), "1", "b", "a"), 3, "payload"),
    ]
    for link, iteration, purpose in elsewhere:
        with pytest.raises(PayloadError, match="altered or replayed"):
            link.open(sealed, iteration, purpose)
    assert Link(secret, "1", "b", "a").open(sealed, 3, "payload") == b"contents"


def test_the_same_contents_are_sealed_to_other_bytes_each_time() -> None:
    # A node that was set back seals the same iteration again.
    sealed = {A.seal(b"contents", 3, "payload") for _ in range(200)}
    assert len({one[:12] for one in sealed}) == 200
    assert len({one[12:] for one in sealed}) == 200


@pytest.mark.parametrize(
    "introduction",
    [b"", bytes(INTRODUCTION_BYTES - 1), bytes(INTRODUCTION_BYTES), b"\1" + bytes(INTRODUCTION_BYTES - 1)],
    ids=["empty", "short", "zeros", "of small order"],
)
def test_keys_that_no_node_has_are_refused_and_so_is_a_nodes_own(introduction: bytes) -> None:
    me = someone()
    for refused in (introduction, me.introduction):
        with pytest.raises(PayloadError, match="malformed introduction"):
            me.secret_with(refused)


# Whom a node trusts


def test_the_first_key_is_trusted_and_no_other_one_after_it() -> None:
    me, friend, stranger = Links(someone(), "1", "a"), someone(), someone()
    with pytest.raises(PayloadError, match="not introduced"):
        me.link("b")
    me.meet("b", friend.introduction)
    with pytest.raises(PayloadError, match="another key"):
        me.meet("b", stranger.introduction)
    assert me.link("b").secret == friend.secret_with(me.identity.introduction)
    assert not me.pinned
    # A neighbour that began anew has the same key.
    restarted = NodeIdentity(friend.key, SealingKey.drawn())
    me.meet("b", restarted.introduction)
    assert me.link("b").secret == restarted.secret_with(me.identity.introduction)


def test_pins_leave_nobody_else_not_even_whom_the_node_knew_before() -> None:
    friend, stranger = someone(), someone()
    pins = {"b": friend.key.public}
    me = Links(someone(), "1", "a", pins)
    assert me.pinned
    with pytest.raises(PayloadError, match="not pinned"):
        me.meet("c", friend.introduction)
    with pytest.raises(PayloadError, match="another key"):
        me.meet("b", stranger.introduction)
    me.meet("b", friend.introduction)
    with pytest.raises(PayloadError, match="another key"):
        Links(someone(), "1", "a", pins, {"b": stranger.introduction}).link("b")


# A node's own contents


def test_what_is_locked_its_owner_reads_alone() -> None:
    key = SealingKey.drawn()
    locked = key.lock(b"state", "partition 3")
    assert SealingKey(key.private).unlock(locked, "partition 3") == b"state"
    for other, about in ((SealingKey.drawn(), "partition 3"), (key, "partition 4")):
        with pytest.raises(PayloadError, match="altered or replayed"):
            other.unlock(locked, about)


# Files


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "node.pem"
    made = SealingKey.at(path)
    assert SealingKey.at(path).private == made.private
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert SealingKey.at(tmp_path / "other.pem").private != made.private


def test_a_key_that_others_may_read_or_that_is_no_x25519_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    SealingKey.at(path)
    for mode in (0o644, 0o640, 0o660, 0o604):
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"must have the mode 0600, .*got {mode:04o}"):
            SealingKey.at(path)
    path.chmod(0o600)
    other = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for text in (b"key", b"", other):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=f"sealing key {path}"):
            SealingKey.at(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written"):
        SealingKey.at(tmp_path / "node.pem")


def test_pins_are_public_keys_in_base64_in_a_toml_file(tmp_path: Path) -> None:
    keys = {name: SealingKey.drawn().public for name in ("0", "3", "ward-3")}
    path = tmp_path / "neighbours.toml"
    with pytest.raises(ValueError, match=f"neighbour keys must be a TOML file .*got {path}: "):
        read_pins(path)
    path.write_text("".join(f'"{name}" = "{base64.b64encode(key).decode()}"\n' for name, key in keys.items()))
    assert read_pins(path) == keys
    for value in ('"x"', "7", '""', f'"{base64.b64encode(bytes(KEY_BYTES - 1)).decode()}"'):
        path.write_text(f"3 = {value}\n")
        with pytest.raises(ValueError, match=r"3 must be 32 bytes in base64, got "):
            read_pins(path)
    path.write_text("3 =")
    with pytest.raises(ValueError, match=f"neighbour keys must be a TOML file .*got {path}: "):
        read_pins(path)
