// Talking to the service: reading, acting with a token, and the live stream with polling as its fallback.

const TOKEN_KEY = "forewarn-token";
const POLL_MS = 5000;
const QUIET_MS = 45000;

export class ServiceError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path, query) {
  const search = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  const text = search.toString();
  return call("GET", text ? `${path}?${text}` : path);
}

export async function send(method, path, body) {
  return call(method, path, body);
}

// All items of a paged list, up to `most`; `onPage(items)` sees them as they come.
export async function getAll(path, query, most, onPage) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(path, { ...query, limit: Math.min(1000, most), cursor });
    items.push(...(page.items || []));
    if (onPage) onPage(items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return items;
}

function headers(body) {
  const made = { Accept: "application/json" };
  if (body !== undefined) made["Content-Type"] = "application/json";
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) made.Authorization = `Bearer ${token}`;
  return made;
}

async function call(method, path, body, asked) {
  let answer;
  try {
    answer = await fetch(path, { method, headers: headers(body), body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
  } catch {
    throw new ServiceError(0, "The service does not answer.");
  }
  if ((answer.status === 401 || answer.status === 403) && !asked) {
    if (await askToken(answer.status === 403 || sessionStorage.getItem(TOKEN_KEY) !== null, method)) return call(method, path, body, true);
  }
  if (!answer.ok) {
    let detail = answer.statusText;
    try {
      const problem = await answer.json();
      detail = problem.detail || problem.title || detail;
    } catch {
      // No problem document: the status must do.
    }
    if (answer.status === 401) sessionStorage.removeItem(TOKEN_KEY);
    throw new ServiceError(answer.status, typeof detail === "string" ? detail : JSON.stringify(detail));
  }
  return answer.status === 204 ? {} : answer.json();
}

let asking = null;

function askToken(hadOne, method) {
  if (asking) return asking;
  const dialog = document.getElementById("token-dialog");
  const input = document.getElementById("token-input");
  const role = method === "GET" ? "Reading here needs a token with the role reader or operator." : "This action needs a token with the role operator.";
  document.getElementById("token-why").textContent = `${hadOne ? "The token was not enough. " : ""}${role} It is kept for this tab only.`;
  input.value = "";
  asking = new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const used = dialog.returnValue === "use" && input.value.trim() !== "";
        if (used) sessionStorage.setItem(TOKEN_KEY, input.value.trim());
        input.value = "";
        resolve(used);
      },
      { once: true },
    );
    dialog.returnValue = "cancel";
    dialog.showModal();
    input.focus();
  });
  return asking;
}

// Calls `onChange(kind)` when something changed; `onState` hears live or polling.
// A page that nobody looks at gives its stream up: browsers allow six connections to a host, tabs taken together.
export function follow(onChange, onState) {
  let lastWord = 0;
  let failures = 0;
  let abort = null;
  let again = 0;

  async function stream() {
    clearTimeout(again);
    if (abort || document.hidden) return;
    const mine = new AbortController();
    abort = mine;
    const watchdog = setInterval(() => {
      if (Date.now() - lastWord > QUIET_MS) mine.abort();
    }, 5000);
    lastWord = Date.now();
    try {
      const answer = await fetch("v1/stream", { headers: { ...headers(), Accept: "text/event-stream" }, cache: "no-store", signal: mine.signal });
      if (!answer.ok || !(answer.headers.get("content-type") || "").startsWith("text/event-stream")) throw new Error("no stream");
      failures = 0;
      onState("live");
      onChange("reconnected");
      await read(answer.body, (kind) => {
        lastWord = Date.now();
        onState("live");
        if (kind) onChange(kind);
      });
    } catch {
      // Falls through to polling; the next round tries the stream again.
    } finally {
      clearInterval(watchdog);
      mine.abort();
      abort = null;
    }
    lastWord = 0;
    if (document.hidden) return;
    failures += 1;
    onState("polling");
    again = setTimeout(stream, Math.min(30000, 500 * 2 ** Math.min(failures, 6)));
  }

  const leave = () => abort?.abort();
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : stream()));
  addEventListener("pagehide", leave);
  addEventListener("pageshow", stream);
  addEventListener("online", stream);
  stream();
  setInterval(() => {
    if (Date.now() - lastWord > POLL_MS) onChange("poll");
  }, POLL_MS);
}

// Server-sent events of a body: `onEvent(kind)` for each, with null for a sign of life without content.
async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onEvent(null);
    const blocks = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const kind = lines.find((line) => line.startsWith("event:"));
      if (lines.some((line) => line.startsWith("data:"))) onEvent(kind ? kind.slice(6).trim() : "message");
    }
  }
}
