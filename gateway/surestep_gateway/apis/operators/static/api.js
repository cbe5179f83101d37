// What the page asks of the gateway. The root is found from where this file came from, so that any
// prefix of any proxy is kept.

const ROOT = new URL("../", import.meta.url);
const STORED = "surestep-key";
const PATIENCE_MS = 8000;

let key = "";
try {
  key = sessionStorage.getItem(STORED) ?? "";
} catch {
  // storage is switched off: the key lives as long as the page
}

/** Whether a key is in use. */
export const hasKey = () => key !== "";

/** Use another key; an empty one is none. */
export function useKey(text) {
  key = text.trim();
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch {
    // as above
  }
}

/** What went wrong, in words. `kind`: "away", "key", "forbidden" or "refused". */
export class Problem extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("away", "The gateway does not answer.");
  }
  if (response.ok) return response;
  const said = await response.json().then((body) => body.error?.message, () => undefined);
  if (response.status === 401) throw new Problem("key", keyProblem(path));
  const kind = response.status === 403 ? "forbidden" : "refused";
  throw new Problem(kind, said ?? `The gateway answered with status ${response.status}.`);
}

function keyProblem(path) {
  if (!key) return "This server asks for an API key.";
  const chat = path.startsWith("v1/") ? " It may be an admin key, which opens the figures alone." : "";
  return `The server does not accept this API key.${chat}`;
}

/** The overview document. Raises Problem. */
export async function overview() {
  const response = await ask("overview", { signal: AbortSignal.timeout(PATIENCE_MS) });
  try {
    return await response.json();
  } catch {
    throw new Problem("away", "The gateway's answer broke off.");
  }
}

/** The JSON events of a streamed chat. Raises Problem, also for an error within the stream. */
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let done = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Problem("refused", event.error.message);
    yield event;
  }
  if (!done) throw new Problem("away", "The answer broke off: the gateway is gone.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (left + value).split("\n\n");
      left = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield block.slice(6);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("away", "The answer broke off: the gateway is gone.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
