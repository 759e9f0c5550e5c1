// Requests to the API. Errors are thrown as {status, title, fix, code}.
const kept = new Map(); // path -> {tag, value}: an answer that has not changed is not sent again

export class Problem extends Error {
  constructor(fields, status) {
    const wrong = (fields.fields || []).map((one) => `${one.field}: ${one.message}`).join("; ");
    super((fields.title || `the server answers ${status}`) + (wrong ? ` (${wrong})` : ""));
    Object.assign(this, { fix: "", code: "" }, fields, { status });
  }
}

async function answerOf(response) {
  const text = await response.text();
  let value = {};
  try { value = text ? JSON.parse(text) : {}; } catch { value = { title: "the answer is not JSON" }; }
  if (!response.ok) throw new Problem(value, response.status);
  return value;
}

async function send(path, options) {
  try { return await fetch(path, { credentials: "same-origin", cache: "no-store", ...options }); }
  catch { throw new Problem({ title: "The server of this page does not answer.", fix: "Start it again: shoal web" }, 0); }
}

export async function get(path) {
  const before = kept.get(path);
  const response = await send(`/api/v1/${path}`, before ? { headers: { "if-none-match": before.tag } } : {});
  if (response.status === 304) return before.value;
  const value = await answerOf(response);
  const tag = response.headers.get("etag");
  if (tag) {
    kept.delete(path);
    kept.set(path, { tag, value });
    if (kept.size > 40) kept.delete(kept.keys().next().value);
  }
  return value;
}

export async function post(path, body = {}) {
  const headers = { "content-type": "application/json", "x-shoal": "1" };
  return answerOf(await send(`/api/v1/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

// Ask for something, and wait until it is done.
export async function act(path, body) {
  let found = await post(path, body);
  while (found.state === "running") {
    await new Promise((done) => setTimeout(done, 400));
    found = await get(`operations/${found.operation}`);
  }
  if (found.state === "failed") throw new Problem({ ...found.error, title: found.error.message }, 409);
  return found.result;
}

const REOPEN_MS = 3000;

// New rows of a run, or of several with commas between, as they come; returns a function that ends it. Nothing is asked
// for while the page is hidden. Afterwards `onReturn` catches up, and returns the position to go on from.
// `onBreak`: the server is away, or refuses (the browser does not ask again after a refusal, this function does).
export function follow(runs, offset, onRows, onBreak, onReturn) {
  let source = null;
  let position = offset;
  let timer = null;
  let state = "new"; // then "begun", and "over"
  const open = () => {
    source = new EventSource(`/api/v1/stream?runs=${encodeURIComponent(runs)}${position === "" ? "" : `&after=${position}`}`);
    source.onmessage = (message) => {
      const found = JSON.parse(message.data);
      if (found.run === runs) position = found.offset;
      onRows(found);
    };
    source.onerror = () => {
      onBreak();
      if (source?.readyState === EventSource.CLOSED) { close(); timer = setTimeout(onVisible, REOPEN_MS); }
    };
  };
  const close = () => { clearTimeout(timer); source?.close(); source = null; };
  let busy = false;
  const onVisible = async () => {
    if (document.hidden) { close(); return; }
    if (source || busy) return;
    busy = true;
    try { if (state === "begun") position = await onReturn(); } catch { onBreak(); timer = setTimeout(onVisible, REOPEN_MS); return; } finally { busy = false; }
    if (state === "over" || document.hidden) return;
    state = "begun";
    open();
  };
  document.addEventListener("visibilitychange", onVisible);
  onVisible();
  return () => { state = "over"; document.removeEventListener("visibilitychange", onVisible); close(); };
}

export const runPath = (run) => `runs/${encodeURIComponent(run)}`;
export const isFile = false; // a run in one file has no other run to compare with
