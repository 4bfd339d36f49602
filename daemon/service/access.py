"""Who may ask for what: bearer tokens and roles as FastAPI dependencies, and the audit of what people change."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy.engine import Connection
from starlette.concurrency import run_in_threadpool

from forewarn.daemon.service import schema
from forewarn.daemon.service.problems import Problem
from forewarn.daemon.service.service import Service
from forewarn.daemon.service.tokens import ANONYMOUS, Principal

CHALLENGE = {"WWW-Authenticate": "Bearer"}
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

bearer = HTTPBearer(auto_error=False, description="A token made by `forewarn token create`")
"""Only for the documentation: the header is read below."""


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def principal_of(request: Request) -> Principal | None:
    """Whose token the request bears; None when it bears none. Raises Problem for a bad one."""
    header = request.headers.get("authorization", "")
    if not header:
        return None
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise Problem(401, "Authorization: must be Bearer and a token", headers=CHALLENGE)
    text = text.strip()
    tokens = service_of(request).tokens
    wait_s = tokens.refresh_in_s(text)
    if wait_s:
        # Others who wait as well may have had it read meanwhile.
        await asyncio.sleep(wait_s)
        wait_s = 0.0 if tokens.refresh_in_s(text) == 0.0 else None
    if wait_s is not None:
        await run_in_threadpool(tokens.refresh)
    found = tokens.find(text)
    if found is None:
        raise Problem(401, "the token is unknown, revoked or expired", headers=CHALLENGE)
    return found


async def agent(request: Request) -> Principal:
    """An agent's token."""
    found = await principal_of(request)
    if found is None:
        raise Problem(401, "a token with the role agent is needed", headers=CHALLENGE)
    if found.role != "agent":
        raise Problem(403, f"a token with the role agent is needed, this one has {found.role}")
    return found


async def reader(request: Request, _: Annotated[object, Depends(bearer)] = None) -> Principal:
    """A reader's or operator's token; on loopback none is needed, unless the settings say so."""
    found = await principal_of(request)
    if found is not None:
        if found.role not in ("reader", "operator"):
            raise Problem(403, "a token with the role reader or operator is needed, this one has agent")
        return found
    service = service_of(request)
    if service.loopback and service.settings.anonymous_read and _is_local(request):
        return ANONYMOUS
    raise Problem(401, "a token with the role reader or operator is needed", headers=CHALLENGE)


async def operator(request: Request, _: Annotated[object, Depends(bearer)] = None) -> Principal:
    """An operator's token: nothing is changed without."""
    found = await principal_of(request)
    if found is None:
        raise Problem(401, "a token with the role operator is needed", headers=CHALLENGE)
    if found.role != "operator":
        raise Problem(403, f"a token with the role operator is needed, this one has {found.role}")
    return found


def _is_local(request: Request) -> bool:
    """The caller is on this machine and meant it: a page elsewhere whose name was bound to 127.0.0.1 did not."""
    if request.client is not None and request.client.host not in LOCAL_NAMES:
        try:
            if not ipaddress.ip_address(request.client.host).is_loopback:
                return False
        except ValueError:
            return False
    return (request.url.hostname or "") in LOCAL_NAMES


ServiceOf = Annotated[Service, Depends(service_of)]
Reader = Annotated[Principal, Depends(reader)]
Operator = Annotated[Principal, Depends(operator)]


def audit(
    run: Connection, service: Service, who: Principal, action: str, subject: str, **detail: Any
) -> None:
    """Note a change that somebody made, in the transaction that makes it."""
    run.execute(
        schema.audit.insert().values(
            time=service.clock.now(), who=who.id, action=action, subject=subject[:512], detail=detail
        )
    )
