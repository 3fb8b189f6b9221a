"""The page in the browser: a few static files, served beside the public record that they read."""

from collections.abc import Mapping

from aiohttp import web

from subnet.adapters.listener import Listener
from subnet.errors import NotFound

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # Nothing but these files and the public record of this very server: what a peer wrote cannot load or run anything.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def mount_page(listener: Listener, files: Mapping[str, bytes]) -> None:
    """Offer `files` by name at the root, and `index.html` as `/`. Raises ValueError for a kind of file it cannot name."""
    kinds = {name: _KINDS.get(name.rpartition(".")[2]) for name in files}
    unknown = [name for name, kind in kinds.items() if kind is None]
    if unknown:
        raise ValueError(f"no content type is known for {', '.join(unknown)}")

    async def answer(request: web.BaseRequest, name: str) -> web.StreamResponse:
        name = name or "index.html"
        if request.method not in ("GET", "HEAD") or name not in files:
            raise NotFound(f"no route /{name[:200]}; the page is at /, the record below /v1/public/")
        return web.Response(body=files[name], content_type=kinds[name], charset="utf-8", headers=_HEADERS)

    listener.mount("/", answer)
