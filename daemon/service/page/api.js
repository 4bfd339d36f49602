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

// Calls `onChange(kind)` when something changed; `onState` hears live, polling or lost.
export function follow(onChange, onState) {
  let lastWord = 0;
  let failures = 0;
  async function stream() {
    try {
      const answer = await fetch("v1/stream", { headers: { ...headers(), Accept: "text/event-stream" }, cache: "no-store" });
      if (!answer.ok || !(answer.headers.get("content-type") || "").startsWith("text/event-stream")) throw new Error("no stream");
      failures = 0;
      lastWord = Date.now();
      onState("live");
      onChange("reconnected");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const watchdog = setInterval(() => {
        if (Date.now() - lastWord > QUIET_MS) reader.cancel();
      }, 5000);
      let rest = "";
      try {
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          lastWord = Date.now();
          const blocks = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
          rest = blocks.pop();
          for (const block of blocks) {
            const kind = block.split("\n").find((line) => line.startsWith("event:"));
            if (block.split("\n").some((line) => line.startsWith("data:"))) onChange(kind ? kind.slice(6).trim() : "message");
          }
        }
      } finally {
        clearInterval(watchdog);
      }
    } catch {
      // Falls through to polling; the next round tries the stream again.
    }
    failures += 1;
    onState("polling");
    setTimeout(stream, Math.min(30000, 1000 * 2 ** Math.min(failures, 5)));
  }
  stream();
  setInterval(() => {
    if (Date.now() - lastWord > POLL_MS) onChange("poll");
  }, POLL_MS);
}
