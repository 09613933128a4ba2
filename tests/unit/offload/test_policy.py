"""The grammar of storages, which pattern decides about a site, and what a wrong policy is told."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.policy import KEEP, TIERS, Policy, PolicyError, Storage, check_sites

STORAGES = [Storage(*parts) for parts in itertools.product((False, True), (False, True), (None, *TIERS))]
SITES = ("layer", "kda.input", "kda.core", "moe.dispatch_input", "mtp.kda.core", "vit.layer")


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_storage_is_read_as_it_is_written(storage: Storage) -> None:
    assert Storage.parse(str(storage)) == storage


def test_how_storages_are_written() -> None:
    assert str(KEEP) == "keep" and Storage.parse("keep") == Storage(False, False, None)
    assert Storage.parse("fp8+host") == Storage(False, True, "host")
    assert Storage.parse("recompute+nvme") == Storage(True, False, "nvme")
    assert len({str(storage) for storage in STORAGES}) == len(STORAGES)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("host+fp8", "did you mean fp8+host?"),
        ("recompte", "did you mean recompute?"),
        ("fp8+hots", "did you mean fp8+host?"),
        ("host+nvme", "did you mean host?"),
        ("keep+host", "[recompute+][fp8+][host|peer|nvme]"),
        ("fp8+fp8", "did you mean fp8?"),
        ("disk", "[recompute+][fp8+][host|peer|nvme]"),
        ("", "[recompute+][fp8+][host|peer|nvme]"),
        ("fp8+", "[recompute+][fp8+][host|peer|nvme]"),
    ],
)
def test_a_wrong_storage_is_refused_with_its_site(text: str, hint: str) -> None:
    with pytest.raises(PolicyError) as refused:
        Policy.read({}, {"kda.core": text})
    assert str(refused.value).startswith(f"kda.core={text}: no such storage")
    assert hint in str(refused.value) and "\n" not in str(refused.value)


def test_an_exact_name_comes_first_then_the_longest_pattern_then_keep() -> None:
    policy = Policy.read({"*": "host", "kda.*": "fp8", "kda.core": "nvme", "k*": "recompute"})
    assert {site: str(policy.storage(site)) for site in SITES} == {
        "layer": "host",
        "kda.input": "fp8",
        "kda.core": "nvme",
        "moe.dispatch_input": "host",
        "mtp.kda.core": "host",
        "vit.layer": "host",
    }
    assert Policy.read({"kda.*": "host"}).storage("layer") == KEEP
    assert policy.pattern("kda.input") == "kda.*" and Policy().pattern("layer") is None


def test_what_the_run_says_comes_before_the_policy_however_short() -> None:
    policy = Policy.read({"kda.core": "nvme", "layer": "recompute"}, {"k*": "keep"})
    assert policy.storage("kda.core") == KEEP
    assert policy.storage("layer") == Storage(recompute=True)


def test_a_star_matches_dots_and_case_counts() -> None:
    policy = Policy.read({"*core": "host"})
    assert policy.storage("mtp.kda.core").tier == "host" and policy.storage("kda.Core") == KEEP


def test_tiers_that_are_needed() -> None:
    policy = Policy.read({"kda.*": "fp8+host", "nothing": "nvme"}, {"layer": "recompute+peer"})
    assert policy.tiers() == {"host", "nvme", "peer"}
    assert policy.tiers(["kda.core", "moe.router"]) == {"host"}


@given(
    st.dictionaries(st.sampled_from([*SITES, "*", "kda.*", "*.core"]), st.sampled_from(STORAGES)),
    st.dictionaries(st.sampled_from([*SITES, "m*", "kda.*"]), st.sampled_from(STORAGES)),
)
def test_a_policy_is_read_as_it_is_written(sites: dict[str, Storage], base: dict[str, Storage]) -> None:
    policy = Policy(sites, base)
    again = Policy.parse(str(policy))
    assert again == policy
    assert [again.storage(site) for site in SITES] == [policy.storage(site) for site in SITES]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    check_sites(Policy.read({"other.model": "host"}, {"kda.*": "host", "layer": "keep"}), SITES)
    with pytest.raises(PolicyError) as refused:
        check_sites(Policy.read({}, {"kda.cor": "host"}), SITES)
    assert str(refused.value) == "kda.cor=host: no such site; did you mean kda.core?"
    with pytest.raises(
        PolicyError, match=r"valid are kda\.core, kda\.input, layer, .* patterns of them like"
    ):
        check_sites(Policy.read({}, {"zzz": "host"}), SITES)
