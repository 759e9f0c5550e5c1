"""The OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

import shoal
from shoal.spec.base import Spec
from shoal.web.table import ApiRoute, NoInput

REFERENCE = "#/components/schemas/{model}"
PROBLEM = {
    "type": "object",
    "description": "RFC 9457; errors of Shoal have a code and a fix",
    "properties": {
        "type": {"type": "string"}, "title": {"type": "string"}, "status": {"type": "integer"},
        "code": {"type": "string"}, "where": {"type": "string"}, "fix": {"type": "string"},
    },
    "required": ["type", "title", "status"],
}  # fmt: skip
REFUSALS = {
    "400": "the request is malformed", "401": "no valid token", "403": "the role does not allow it",
    "404": "there is no such run", "409": "the run is in another state", "413": "the body is too large",
    "415": "the body is not JSON", "422": "the input does not fit", "429": "too many requests",
    "503": "files cannot be read",
}  # fmt: skip


def make_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Problem": PROBLEM}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": shoal.__version__, "description": "Runs: read them and steer them."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    answer = {route.media_type: {"schema": _schema(route.answer, schemas)}}
    problem = {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
    made: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "x-role": route.role,
        "security": [] if route.role == "public" else [{"token": []}],
        "parameters": [*_path_parameters(route), *_query_parameters(route.query)],
        "responses": {
            **{str(status): {"description": route.summary, "content": answer} for status in route.statuses},
            **{status: {"description": why, "content": problem} for status, why in REFUSALS.items()},
        },
    }
    if route.method == "POST":
        body = route.body or NoInput
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body, schemas)}}}
    return made


def _path_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]


def _query_parameters(query: type[Spec]) -> list[dict[str, Any]]:
    schema = query.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": one}
        for name, one in schema.get("properties", {}).items()
    ]


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of an answer; its parts go to the components."""
    made = TypeAdapter(kind).json_schema(ref_template=REFERENCE)
    schemas.update(made.pop("$defs", {}))
    name = made.get("title")
    if name and made.get("type") == "object" and "properties" in made:
        schemas[name] = made
        return {"$ref": REFERENCE.format(model=name)}
    return made
