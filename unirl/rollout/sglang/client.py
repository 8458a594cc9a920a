"""HTTP to one server: every call has a time limit, and every failure is one of two kinds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

# Below the 5 s after which the server closes an idle connection: else a request could meet the closing one.
_KEEP_ALIVE_S = 3.0
_CONNECT_LIMIT_S = 10.0
_MAX_LINE_BYTES = 4 << 20  # an event with the support of some hundred tokens
_SHOWN_CHARS = 600


class ServerLostError(Exception):
    """The server does not answer (any more): refused, reset, or silent beyond the limit."""


class RequestRefusedError(Exception):
    """The server answered that it will not do what it was asked."""


class SGLangClient:
    """JSON requests to one server. To be made, used and closed within one running event loop."""

    def __init__(self, url: str, api_key: str | None):
        self.url = url
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            read_bufsize=_MAX_LINE_BYTES,
        )
        self._under_way: set[asyncio.Timeout] = set()

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The answer's JSON, or its text. Raises ServerLostError, RequestRefusedError."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None) -> Any:
        """The same for a POST; it is never repeated here. Without a limit, the caller has one of his own."""
        return await self._call("POST", path, body, timeout_s)

    async def stream(self, path: str, body: dict[str, Any], *, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer. Ends early (ServerLostError) after `silence_s` without a byte."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S, sock_read=silence_s)
        async with self._request("POST", path, body, limit) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
            raise ServerLostError(f"{self.url}{path}: the answer ended before its last event")

    async def close(self) -> None:
        """Break off what is under way: it raises ServerLostError. May be called twice."""
        for scope in self._under_way:  # aiohttp itself leaves who waits for an answer waiting
            if not scope.expired():
                scope.reschedule(0)
        await self._session.close()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        limit = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(timeout_s or _CONNECT_LIMIT_S, _CONNECT_LIMIT_S)
        )
        async with self._request(method, path, body, limit) as response:
            return await _content(response)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session.closed:
            raise ServerLostError(f"{self.url}: the connection was given up")
        try:
            async with asyncio.timeout(None) as scope:
                self._under_way.add(scope)
                try:
                    async with self._session.request(method, path, json=body, timeout=limit) as response:
                        await self._check(response, path)
                        yield response
                finally:
                    self._under_way.discard(scope)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = "no answer within the limit" if isinstance(error, TimeoutError) else str(error)
            raise ServerLostError(f"{self.url}{path}: {reason or type(error).__name__}") from error

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status >= 500:
            raise ServerLostError(f"{self.url}{path}: {response.status} {await _reason(response)}")
        if response.status >= 400:
            raise RequestRefusedError(f"{self.url}{path}: {response.status} {await _reason(response)}")


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The message in the answer of a server that refuses or fails."""
    content = await _content(response)
    if isinstance(content, dict):
        error = content.get("error", content)
        content = error.get("message", error) if isinstance(error, dict) else error
    return str(content)[:_SHOWN_CHARS]
