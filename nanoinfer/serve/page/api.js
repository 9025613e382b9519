// Requests to the server that this page came from. The key stands in a header only, and stays in this tab.

const KEY = "nanoinfer-key";
let askForKey = async () => null; // see `onKeyNeeded`

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function onKeyNeeded(ask) {
  askForKey = ask;
}

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // storage is off
  }
}

let key = stored();

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // it lasts until the page is left
  }
}

/** Send a request; throw ApiError with what the server says where it refuses. Where it wants a key, the user is asked. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = used === null ? {} : { Authorization: `Bearer ${used}` };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      referrerPolicy: "no-referrer",
    });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (key === used) await askForKey(used !== null);
      continue;
    }
    let message = `the server answers ${answer.status}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      // no JSON
    }
    throw new ApiError(message, answer.status);
  }
}

/** Yield [name, data] of each server-sent event. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        let name = "message";
        const data = [];
        for (const line of text.slice(0, end).split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
