"""Blocks: never lost, never given twice, and a cached one is found until it has been given away."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tidegate.kv.blocks import BlockPool
from tidegate.kv.prefix import PrefixHasher


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool beside the plainest model of it: owners as lists of blocks, and published keys as a dict."""

    SIZE = 8

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.owners = {}
        self.keys = {}
        self.made = 0

    owned = Bundle("owned")

    @rule(target=owned, count=st.integers(1, 4))
    def allocate(self, count):
        if count > self.pool.num_available:
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            count = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        return self.given(blocks)

    @rule(target=owned)
    def allocate_one(self):
        available = self.pool.num_available
        block = self.pool.allocate_one()
        assert (block is None) == (available == 0)
        return self.given([] if block is None else [block])

    def given(self, blocks):
        in_use = {b for held in self.owners.values() for b in held}
        assert not in_use & set(blocks)
        self.keys = {key: block for key, block in self.keys.items() if block not in blocks}
        self.made += 1
        self.owners[self.made] = blocks
        return self.made

    @rule(owner=owned, name=st.binary(min_size=1, max_size=1))
    def publish(self, owner, name):
        for i, block in enumerate(self.owners[owner]):
            key = name + bytes([i])
            if key not in self.keys and block not in self.keys.values():
                self.keys[key] = block
            self.pool.publish(block, key)

    @precondition(lambda self: self.keys)
    @rule(target=owned, data=st.data())
    def share(self, data):
        key = data.draw(st.sampled_from(sorted(self.keys)))
        block = self.pool.lookup(key)
        assert block == self.keys[key]
        self.pool.share(block)
        self.made += 1
        self.owners[self.made] = [block]
        return self.made

    @rule(owner=consumes(owned))
    def release(self, owner):
        self.pool.release(self.owners.pop(owner))

    @rule()
    def clear(self):
        self.pool.clear_cached()
        self.keys = {}

    @invariant()
    def every_block_is_in_one_state(self):
        held = [b for blocks in self.owners.values() for b in blocks]
        for block in range(self.SIZE):
            assert self.pool.refs(block) == held.count(block)
        assert self.pool.num_used == len(set(held))
        cached = {b for b in self.keys.values() if b not in held}
        assert self.pool.num_cached == len(cached)
        assert self.pool.num_free == self.SIZE - len(set(held)) - len(cached)
        for key, block in self.keys.items():
            assert self.pool.lookup(key) == block


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def test_least_recently_released_prefixes_go_first_and_tails_before_heads():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for name, blocks in ((b"o", old), (b"n", new)):
        for i, block in enumerate(blocks):
            pool.publish(block, name + bytes([i]))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup(b"o\0") == old[0] and pool.lookup(b"o\1") is None
    assert pool.allocate(2) == [old[0], new[1]]
    assert pool.lookup(b"n\0") == new[0]


def test_fresh_blocks_come_as_ascending_runs():
    pool = BlockPool(8)
    first = pool.allocate(4)
    assert first == [0, 1, 2, 3]
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 2]


def chain(hasher, tokens, salt=""):
    keys = [hasher.root(salt)]
    hasher.extend(keys, tokens, len(tokens) // hasher.block_size)
    return keys[1:]


def test_equal_prefixes_have_equal_keys_and_a_change_anywhere_changes_all_that_follow():
    hasher = PrefixHasher(4, b"secret")
    tokens = list(range(16))
    keys = chain(hasher, tokens)
    assert chain(hasher, [*tokens, 99]) == keys
    changed = chain(hasher, [*tokens[:5], 77, *tokens[6:]])
    assert changed[0] == keys[0]
    assert all(a != b for a, b in zip(changed[1:], keys[1:], strict=True))


def test_keys_depend_on_salt_and_secret():
    tokens = list(range(8))
    keys = chain(PrefixHasher(4, b"secret"), tokens)
    assert not set(keys) & set(chain(PrefixHasher(4, b"secret"), tokens, "salt"))
    assert not set(keys) & set(chain(PrefixHasher(4, b"other"), tokens))
