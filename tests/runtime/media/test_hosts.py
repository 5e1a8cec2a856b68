"""Hosts that the settings allow, and public addresses."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.allowed_hosts import AllowedHosts
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media.urls import FileUrl, WebUrl, read_url
from staged_pool.runtime.network_addresses import is_public, literal
from staged_pool.stages.errors import ConfigError, InvalidInput


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True), ("a.b.example.com", True), ("example.com.", True), ("badexample.com", False),
        ("example.com.evil.org", False), ("com", False), ("10.0.0.5", True), ("10.0.0.50", False), ("fd00::5", True),
        ("fd00:0::5", True), ("8.8.8.8", False), ("localhost", False),
    ],
)  # fmt: skip
def test_a_name_allows_all_hosts_below_it_and_an_address_itself(host: str, allowed: bool) -> None:
    hosts = AllowedHosts.of(("Example.com", "10.0.0.5", "fd00::5"))
    assert hosts.allow(host) is allowed


def test_a_star_allows_every_name_and_every_public_address() -> None:
    hosts = AllowedHosts.of(("*",))
    assert hosts.allow("example.com")
    assert hosts.allow("8.8.8.8")
    assert not hosts.allow("10.0.0.5")
    assert not hosts.may_dial("10.0.0.5")


@pytest.mark.parametrize(
    "entry",
    ["", " ", "http://example.com", "example.com:80", "*.example.com", "example.com/", "127.1", "1.2.3.4.5", "a..b",
     "-a.com", "bücher.example", "a@b.com", "0x7f000001", "10.0.0.0/8"],
)  # fmt: skip
def test_an_entry_that_is_no_host_is_a_mistake_in_the_settings(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"allow_media_domains=.*: must be a host name"):
        EngineConfig(allow_media_domains=(entry,))


def test_one_host_is_still_a_tuple() -> None:
    with pytest.raises(ConfigError, match="must be a tuple of hosts"):
        EngineConfig(allow_media_domains="example.com")  # type: ignore[arg-type]


@given(st.ip_addresses(v=4))
def test_no_address_of_ipv4_becomes_public_by_being_carried_in_one_of_ipv6(address: object) -> None:
    number = int(ip_address(str(address)))
    mapped, compatible = (0xFFFF << 32) | number, number
    nat64, sixtofour = (0x64FF9B << 96) | number, (0x2002 << 112) | (number << 80)
    teredo = (0x20010000 << 96) | number
    assert not any(is_public(IPv6Address(one)) for one in (mapped, compatible, nat64, sixtofour, teredo))


@given(st.ip_addresses())
def test_what_python_takes_for_private_is_never_public(address: object) -> None:
    one = ip_address(str(address))
    if one.is_private or one.is_loopback or one.is_link_local or one.is_multicast or one.is_reserved:
        assert not is_public(one)


@given(st.text(st.sampled_from("htps:/@.[]0127%aé\\ \n#?xfile")) | st.text())
def test_any_text_is_a_url_or_rejected(text: str) -> None:
    for url in (text, f"http://{text}", f"http://a.example{text}", f"file://{text}"):
        try:
            found = read_url(url)
        except InvalidInput:
            continue
        if isinstance(found, FileUrl):
            assert found.path.startswith("/")
        else:
            assert isinstance(found, WebUrl)
            assert found.host.isascii()
            assert not set("@/\\ \r\n\0?#[]") & set(found.host)
            assert found.target.startswith("/")
            assert found.target.isascii()
            assert not any(character <= " " for character in found.target)


@given(st.ip_addresses())
def test_an_address_has_one_spelling(address: object) -> None:
    assert literal(str(address)) == address
    assert literal(f"{address}%lo") is None
