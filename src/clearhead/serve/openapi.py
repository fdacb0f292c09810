"""`/metrics`, and `/docs`: the routes as a page that needs nothing from the network."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jinja2
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics for Prometheus."""
    return Response(request.app.state.registry.metrics.text(), media_type=METRICS_TYPE)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The documentation of all routes."""
    app: FastAPI = request.app
    if not hasattr(app.state, "docs_page"):
        source = (resources.files("clearhead.serve") / "docs.html").read_text(encoding="utf-8")
        template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
        app.state.docs_page = template.render(groups=_groups(app.openapi()))
    return HTMLResponse(app.state.docs_page, headers=PAGE_HEADERS)


def _groups(schema: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The operations of each tag, with the fields of their bodies and answers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = next((_resolve(schema, each["schema"]) for each in content.values()), None)
            answer = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
            groups.setdefault(operation.get("tags", ["other"])[0], []).append(
                {
                    "method": method.upper(),
                    "path": path,
                    "about": operation.get("description", ""),
                    "fields": [] if body is None else _fields(body),
                    "answer": _type(answer),
                    "answer_fields": _fields(_resolve(schema, answer)),
                }
            )
    return groups


def _resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in part:
        found: dict[str, Any] = schema["components"]["schemas"][part["$ref"].rpartition("/")[2]]
        return found
    return part


def _fields(part: dict[str, Any]) -> list[dict[str, Any]]:
    required = part.get("required", [])
    return [
        {
            "name": name,
            "type": _type(field),
            "default": json.dumps(field["default"]) if "default" in field else "",
            "required": name in required,
        }
        for name, field in part.get("properties", {}).items()
    ]


def _type(field: dict[str, Any]) -> str:
    """A type as text, with its bounds."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " | ".join(dict.fromkeys(map(_type, field[key])))
    if "enum" in field or "const" in field:
        return " | ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    bounds = f" {'' if low is None else f'{low:g}'}…{'' if high is None else f'{high:g}'}"
    return str(field.get("type", "object")) + (bounds if (low, high) != (None, None) else "")
