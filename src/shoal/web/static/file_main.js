// A run in one file.
import { render } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./show.js";
import { current } from "./route.js";
import { runName } from "./api.js";
import { Run } from "./run.js";

function App() {
  const [where, setWhere] = useState(current());
  useEffect(() => {
    const moved = () => setWhere(current());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return html`<main id="main"><${Run} name=${runName} query=${where.query} me=${{ role: "read", name: "file", runs: [] }} /></main>`;
}

document.title = `${runName} – Shoal`;
render(html`<${App} />`, document.getElementById("app"));
