"""HTML pages: a home page and the API's documentation.

Generated from the OpenAPI document, without scripts and without external resources.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from starlette.responses import Response

Json = Mapping[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.5 ui-monospace, monospace; background: #8882; border-radius: 3px }
code { padding: 0 0.2em } pre { padding: 0.8em; overflow: auto }
table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; padding: 0.2em 1em 0.2em 0 }
summary { cursor: pointer; padding: 0.3em 0 }
:root { color-scheme: light dark }
"""
_STYLE_HASH = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_LINKS = (
    ("/ui", "its status, live, and a chat"),
    ("/docs", "what the API takes"),
    ("/status", "every process, as JSON"),
    ("/metrics", "for Prometheus"),
    ("/health/ready", "whether requests would be served"),
    ("/openapi.json", "the API for programs"),
)
_REF = "#/components/schemas/"
_BOUNDS = (
    ("minimum", "≥"),
    ("exclusiveMinimum", ">"),
    ("maximum", "≤"),
    ("exclusiveMaximum", "<"),
    ("minLength", "length ≥"),
    ("maxLength", "length ≤"),
    ("minItems", "items ≥"),
    ("maxItems", "items ≤"),
    ("maxProperties", "entries ≤"),
)


def home_page(
    version: str, models: Sequence[str], state: str, root: str, hidden: Collection[str]
) -> Response:
    """Return GET / of a server whose paths begin with `root`, without links to `hidden` paths."""
    names = ", ".join(f"<code>{escape(name)}</code>" for name in models)
    links = "".join(
        f'<li><a href="{escape(root)}{path}">{path}</a>: {escape(text)}</li>'
        for path, text in _LINKS
        if path not in hidden
    )
    example = escape(
        "from openai import OpenAI\n\n"
        'client = OpenAI(base_url="http://HOST:PORT/v1", api_key="none")\n'
        f'client.chat.completions.create(model="{models[0]}",\n'
        '    messages=[{"role": "user", "content": "Why is the sky blue?"}])'
    )
    return _page(
        "Surestep",
        f"<p>An LLM server with OpenAI's API, version {escape(version)}. "
        f"It serves {names} and is <b>{escape(state)}</b>.</p>"
        f"<ul>{links}</ul><pre>{example}</pre>",
    )


def docs_page(document: Json, root: str) -> Response:
    """Return GET /docs: the OpenAPI document as HTML; paths begin with `root`."""
    schemas = document["components"]["schemas"]
    operations = "".join(
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return _page(
        "Surestep: the API",
        f'<p>The same <a href="{escape(root)}/openapi.json">for programs</a>. Keys go into the '
        f"header <code>Authorization: Bearer KEY</code>.</p>{operations}",
    )


def _page(title: str, body: str) -> Response:
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )
    return Response(html, media_type="text/html", headers=_HEADERS)


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    tables = "".join(_fields(name, schemas) for name in _names(body.get("schema", {})))
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<details><summary><code>{escape(method.upper())} {escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>{tables}"
        f"<table><tr><th>status</th><th></th></tr>{answers}</table></details>"
    )


def _names(schema: Json) -> Iterable[str]:
    """Return the names of the bodies that an operation accepts."""
    for one in schema.get("anyOf", [schema]):
        if "$ref" in one:
            yield one["$ref"].removeprefix(_REF)


def _fields(name: str, schemas: Json) -> str:
    schema = schemas[name]
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{escape(_kind(about, schemas))}</td>"
        f"<td>{'required' if field in required else ''}</td></tr>"
        for field, about in schema.get("properties", {}).items()
    )
    return f"<p>{escape(schema.get('description', name))}</p><table>{rows}</table>"


def _kind(schema: Json, schemas: Json) -> str:
    """Return the type of a field in a few words."""
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_kind(one, schemas) for one in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) or "null"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"object with {', '.join(schemas[name].get('properties', ())) or name}"
    if "enum" in schema or "const" in schema:
        return ", ".join(map(repr, schema.get("enum") or [schema["const"]]))
    kind = str(schema.get("type", "anything"))
    if kind == "array" and schema.get("items"):
        kind = f"list of {_kind(schema['items'], schemas)}"
    bounds = [f"{sign} {schema[key]:,}" for key, sign in _BOUNDS if key in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind
