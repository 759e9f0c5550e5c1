function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; } // written by hand
}

// The address keeps the view: #/run/name?tab=logs. `go` changes parts of it.
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").replace(/^(code|token)=.*/, "").split("?");
  const [page = "", ...rest] = path.split("/");
  return { page: page || "runs", name: rest.map(decoded).join("/"), query: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(page, name = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(kept).toString();
  return `#/${page}${name ? `/${encodeURIComponent(name)}` : ""}${text ? `?${text}` : ""}`;
}

export function change(query) {
  const now = current();
  history.replaceState(null, "", link(now.page, now.name, { ...now.query, ...query }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export const go = (...where) => { location.hash = link(...where); };

// Whether a key is for the page: not for a field, nor for a question that is asked. (A button that is pressed and then disabled loses the focus, and so does its question.)
export const isForPage = (event) => !(event.target.closest("input, select, textarea, dialog") || document.querySelector("dialog[open]")
  || event.ctrlKey || event.metaKey || event.altKey);
