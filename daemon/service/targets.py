"""Where webhooks may go: which addresses are allowed, and one resolution that the request is then pinned to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from forewarn.collectors.errors import ConfigError, InputError, UnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_URL_CHARS = 2048


@dataclass(frozen=True)
class Target:
    """A URL whose host is an address already; name and port go into the Host header and the TLS handshake."""

    pinned_url: str
    host: str
    host_header: str


def system_resolver(host: str, port: int) -> list[str]:
    """Addresses of a name. Raises UnavailableError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"webhook: {host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class TargetPolicy:
    """https to public addresses, and what the operator lists: names, addresses or networks."""

    def __init__(
        self,
        allow: Sequence[str] = (),
        *,
        allow_insecure: bool = False,
        resolver: Callable[[str, int], list[str]] = system_resolver,
    ) -> None:
        """Raises ConfigError for an entry that is neither a name nor a network."""
        self._names: set[str] = set()
        self._networks: list[Network] = []
        self._insecure, self._resolver = allow_insecure, resolver
        for entry in allow:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip(), strict=False))
            except ValueError:
                name = entry.strip().lower().rstrip(".")
                if not name or "/" in name or ":" in name:
                    raise ConfigError(
                        f"service.allow_webhook_hosts: {entry!r} is neither a name nor an address nor a network"
                    ) from None
                self._names.add(name)

    def check(self, url: str) -> None:
        """What can be said of a URL without resolving it. Raises InputError."""
        self._parts(url)

    def resolve(self, url: str) -> Target:
        """Resolve once and pin. Raises InputError when it may not go there, UnavailableError when nothing is found."""
        scheme, host, port, rest = self._parts(url)
        literal = _address(host)
        listed = host in self._names
        addresses = [literal] if literal else [a for t in self._resolver(host, port) if (a := _address(t))]
        for address in addresses:
            if self._allowed(address, listed) and (scheme == "https" or listed or self._in_networks(address)):
                shown = f"[{address}]" if address.version == 6 else str(address)
                name = f"[{host}]" if ":" in host else host
                default = 443 if scheme == "https" else 80
                return Target(
                    f"{scheme}://{shown}:{port}{rest}", host, name if port == default else f"{name}:{port}"
                )
        if not addresses:
            raise UnavailableError(f"webhook: {host} has no address")
        raise InputError(
            f"webhook.url: {host} is at {addresses[0]}, where webhooks may not go; if it is meant, put it into "
            " service.allow_webhook_hosts"
        )

    def _in_networks(self, address: Address) -> bool:
        return any(address.version == n.version and address in n for n in self._networks)

    def _allowed(self, address: Address, listed: bool) -> bool:
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        address = mapped or address
        if self._in_networks(address):
            return True
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            return False  # among them the metadata service of clouds; a name is not enough for these
        return listed or address.is_global

    def _parts(self, url: str) -> tuple[str, str, int, str]:
        if len(url) > MAX_URL_CHARS:
            raise InputError(f"webhook.url: longer than {MAX_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"webhook.url: {error}") from None
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host:
            raise InputError("webhook.url: must be https://HOST/PATH")
        if parts.username or parts.password:
            raise InputError("webhook.url: must not hold a name or password")
        literal = _address(host)
        listed = host in self._names or (literal is not None and self._in_networks(literal))
        if parts.scheme == "http" and not (self._insecure and (listed or literal is None)):
            raise InputError(
                "webhook.url: must be https; http is for hosts in service.allow_webhook_hosts, once "
                "service.allow_insecure_webhooks is on"
            )
        if literal is not None and not self._allowed(literal, listed):
            raise InputError(
                f"webhook.url: {host} is not a public address; if it is meant, put it into service.allow_webhook_hosts"
            )
        rest = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return parts.scheme, host, port or (443 if parts.scheme == "https" else 80), rest


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
