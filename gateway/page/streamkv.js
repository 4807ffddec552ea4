/**
 * A client of StreamKV for browsers, and for whatever else has fetch, WebSocket and TextDecoderStream. No dependencies.
 *
 *     import { StreamKV } from "./streamkv.js";
 *
 *     const client = new StreamKV({ baseUrl: "http://127.0.0.1:8000", apiKey: "" });
 *     const answer = client.stream({
 *       messages: [{ role: "user", content: "Hello" }],
 *       max_tokens: 64,                     // every field of POST /v1/chat/completions, or with `prompt` /v1/completions
 *     }, { transport: "websocket" });       // or "sse"
 *     for await (const event of answer) {
 *       if (event.type === "delta") process(event.text);
 *     }
 *
 * `answer.cancel()` ends it, and so does leaving the loop. A connection that breaks is made again, and the answer goes on
 * where it was, without loss and without doubling, as long as the server keeps it (`attachGraceS`).
 *
 * Events, in this order:
 *   { type: "started", streamId, model, numPromptTokens }         streamId: null over SSE from a server that tells none
 *   { type: "delta", index, text, reasoning, toolCalls, numTokens }   what is new of a choice; numTokens: its tokens so far
 *   { type: "finished", index, finishReason, stopReason, cause, numTokens }   once per choice: stop, length, abort, tool_calls
 *   { type: "done", usage }                                       OpenAI's usage, or null
 * and between them, while a broken connection is mended:
 *   { type: "reconnecting", attempt, delayS }
 *   { type: "reconnected" }
 * What cannot be mended is thrown out of the loop as a StreamKVError.
 *
 * An answer outlives its page: keep `answer.cursor` (plain data) beside the text, and go on with
 * `client.attach(cursor)` after a reload.
 */

const FIRST_DELAY_S = 0.25;
const LONGEST_DELAY_S = 5;
const MAX_QUEUED = 4096; // events of one answer that nobody has read; then the server is asked to wait
const DEFAULT_GRACE_S = 120;

/** What the server refused or could not do. `status` is that of the HTTP answer, 0 without one. */
export class StreamKVError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    this.name = "StreamKVError";
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }
}

const STATUS_OF_CODE = {
  invalid_api_key: 401, origin_not_allowed: 403, model_not_found: 404, unknown_stream: 404, rate_limit_exceeded: 429,
  overloaded: 503, not_ready: 503, timeout: 504, internal_error: 500, engine_error: 500, invalid_value: 400,
};

/** An error object in OpenAI's form → StreamKVError. */
function toError(fields, status = 0, retryAfter = null) {
  const error = fields && typeof fields === "object" ? fields : { message: String(fields) };
  const retryAfterS = error.retry_after_s ?? (retryAfter !== null && retryAfter !== "" ? Number(retryAfter) : null);
  return new StreamKVError(String(error.message ?? "the server gave no reason"), {
    status: status || STATUS_OF_CODE[error.code] || 0,
    code: error.code ?? null,
    param: error.param ?? null,
    retryAfterS: Number.isFinite(retryAfterS) ? retryAfterS : null,
  });
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let fields = { message: text.slice(0, 300) || `HTTP ${response.status} ${response.statusText}` };
  try {
    fields = JSON.parse(text).error ?? fields;
  } catch { /* not JSON: its beginning says what there is to say */ }
  return toError(fields, response.status, response.headers.get("Retry-After"));
}

/** The events of an SSE body, parsed: { id, data }. `id` is that of the last event that had one. */
export async function* sseEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let id = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (pending + value).split("\n");
      pending = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { id, data: data.join("\n") };
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("id:")) {
          id = line.slice(line[3] === " " ? 4 : 3);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const sleep = (seconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

const delayS = (attempt) => Math.min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** attempt) * (0.75 + Math.random() / 2);

/** One answer: an async iterator of its events. */
class Answer {
  constructor(cursor) {
    this._queue = []; // [event, place behind it]
    this._place = cursor.place; // behind the last event that was received
    this._streamId = cursor.streamId;
    this._hasRead = false; // since it was last taken up
    this._wake = null;
    this._drained = null;
    this._isOver = false;
    this._failure = null;
    this._stop = () => {};
    this._onBacklog = () => {};
    /** What `attach` needs to go on behind the last event that was read: plain data, to be kept beside the text. */
    this.cursor = cursor;
  }

  /** End it. The server is told, and what it says of the end still comes. */
  cancel() {
    this._stop();
  }

  async* [Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this._queue.length) {
          const [event, place] = this._queue.shift();
          if (this._queue.length === MAX_QUEUED / 4) this._onBacklog(false);
          this.cursor.place = place;
          this.cursor.streamId = this._streamId;
          yield event;
        }
        this._drained?.();
        if (this._failure) throw this._failure;
        if (this._isOver) return;
        await new Promise((resolve) => { this._wake = resolve; });
      }
    } finally {
      if (!this._isOver) this.cancel();
    }
  }

  _push(event) {
    if (this._isOver) return;
    this._queue.push([event, this._place]);
    if (this._queue.length === MAX_QUEUED) this._onBacklog(true);
    this._wake?.();
  }

  /** Nothing comes after it. */
  _end(failure = null) {
    if (this._isOver) return;
    this._isOver = true;
    this._failure = failure;
    this._drained?.();
    this._wake?.();
  }

  /** A choice stands here now: `entry` as the server's cursors have it. */
  _stand(index, entry) {
    const entries = this._place ? this._place.split(",") : [];
    while (entries.length <= index) entries.push("-");
    entries[index] = entry;
    this._place = entries.join(",");
  }
}

const newCursor = (transport, graceS) => ({ transport, streamId: null, place: "", graceS });

export class StreamKV {
  /** baseUrl: where the server is, with or without a path. apiKey: may be empty. */
  constructor({ baseUrl = globalThis.location?.href ?? "", apiKey = "" } = {}) {
    this._base = new URL(".", baseUrl);
    this.apiKey = apiKey;
    this._socket = null;
  }

  /** Where `path` is, as "v1/models". */
  url(path) {
    return new URL(path, this._base);
  }

  get _headers() {
    return this.apiKey ? { Authorization: `Bearer ${this.apiKey}` } : {};
  }

  /** How far the server is: { ready, status, stage, percent }. Throws a StreamKVError when it cannot be reached. */
  async ready() {
    const response = await this._fetch("ready", { cache: "no-store" });
    const fields = await response.json().catch(() => ({}));
    const { status = "unknown", stage = "", percent = 0 } = fields;
    return { ready: response.ok, status, stage, percent };
  }

  /** The models there are, as GET /v1/models lists them. */
  async models() {
    return (await this.getJson("v1/models")).data;
  }

  /** The JSON at a path. Throws a StreamKVError for everything but 200. */
  async getJson(path) {
    const response = await this._fetch(path, { headers: this._headers, cache: "no-store" });
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  async _fetch(path, init) {
    try {
      return await fetch(this.url(path), init);
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new StreamKVError("the server cannot be reached");
    }
  }

  /** Ask for an answer. request: the fields of a chat body (`messages`) or a completion body (`prompt`). */
  stream(request, { transport = "sse", attachGraceS = DEFAULT_GRACE_S } = {}) {
    const answer = new Answer(newCursor(transport, attachGraceS));
    if (transport === "websocket") this._overSocket(answer, request);
    else this._overSse(answer, request);
    return answer;
  }

  /** Go on with an answer, from its cursor: events come from there on. Throws StreamKVError with code unknown_stream
   * into its loop when the server has it no more. */
  attach(cursor) {
    const answer = new Answer({ ...cursor });
    if (cursor.transport === "websocket") this._overSocket(answer, null);
    else this._overSse(answer, null);
    return answer;
  }

  /** Drop the WebSocket, if there is one; what is live on it goes on at the server for its grace period. */
  close() {
    this._socket?.close();
    this._socket = null;
  }

  // WebSocket

  _overSocket(answer, request) {
    if (this._socket === null || this._socket.isClosed || this._socket.apiKey !== this.apiKey) {
      this._socket = new SharedSocket(this);
    }
    this._socket.add(answer, request);
  }

  // Server-sent events

  async _overSse(answer, request) {
    const connection = new AbortController();
    let isStopped = false;
    answer._stop = () => {
      if (isStopped) return;
      isStopped = true;
      if (answer._streamId !== null) this._cancelSse(answer, connection);
      else if (request === null) connection.abort();
    };
    let lostAtMs = 0;
    for (let attempt = 0; ; attempt++) {
      try {
        const response = answer._streamId === null
          ? await this._postSse(answer, request, connection.signal)
          : await this._resumeSse(answer, connection.signal);
        if (isStopped) this._cancelSse(answer, connection); // the stream has its name only now
        if (attempt) answer._push({ type: "reconnected" });
        if (response.status === 204 || await this._readSse(answer, response)) return answer._end();
        throw new StreamKVError("the connection broke off");
      } catch (error) {
        if (connection.signal.aborted || isStopped) return answer._end();
        // Of a reconnected stream that brought something, a later break is a new one.
        if (answer._hasRead) attempt = lostAtMs = 0;
        answer._hasRead = false;
        lostAtMs ||= performance.now();
        const isLate = (performance.now() - lostAtMs) / 1000 > answer.cursor.graceS;
        if (answer._streamId === null || isLate || !isWorthRetrying(error)) {
          return answer._end(error instanceof StreamKVError ? error : new StreamKVError("the connection broke off"));
        }
        const waitS = Math.max(error.retryAfterS ?? 0, delayS(attempt));
        answer._push({ type: "reconnecting", attempt: attempt + 1, delayS: waitS });
        await sleep(waitS, connection.signal);
      }
    }
  }

  async _postSse(answer, request, signal) {
    const path = "messages" in request ? "v1/chat/completions" : "v1/completions";
    const response = await this._fetch(path, {
      method: "POST",
      headers: { ...this._headers, "Content-Type": "application/json" },
      body: JSON.stringify({
        attach_grace_s: answer.cursor.graceS, ...request, stream: true, stream_options: { include_usage: true },
      }),
      signal,
    });
    if (!response.ok) throw await errorOf(response);
    answer._streamId = response.headers.get("X-Stream-Id");
    return response;
  }

  async _resumeSse(answer, signal) {
    const place = answer._place ? `?cursor=${encodeURIComponent(answer._place)}` : "";
    const response = await this._fetch(`v1/streams/${answer._streamId}${place}`, { headers: this._headers, cache: "no-store", signal });
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  /** Tell the server; what it says of the end is still read, for a moment. */
  _cancelSse(answer, connection) {
    this._fetch(`v1/streams/${answer._streamId}`, { method: "DELETE", headers: this._headers, keepalive: true }).catch(() => {});
    setTimeout(() => connection.abort(), 2000);
  }

  /** Hand out the events of one response. Returns whether it came to its end. */
  async _readSse(answer, response) {
    let hasStarted = false;
    let usage = null;
    for await (const { id, data } of sseEvents(response.body)) {
      if (id) [answer._streamId, answer._place] = cut(id);
      if (data === "[DONE]") {
        answer._push({ type: "done", usage });
        return true;
      }
      const fields = JSON.parse(data);
      if (fields.error) throw Object.assign(toError(fields.error), { isFinal: true });
      if (!hasStarted) {
        hasStarted = true;
        answer._push({ type: "started", streamId: answer._streamId, model: fields.model, numPromptTokens: null });
      }
      usage = fields.usage ?? usage;
      const entries = answer._place.split(",");
      for (const { index, delta = {}, text = "", finish_reason: reason, stop_reason: stopReason = null } of fields.choices ?? []) {
        answer._hasRead = true;
        const event = {
          type: "delta", index, text: delta.content ?? text, reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
          toolCalls: (delta.tool_calls ?? []).map(({ index: at, id: callId, function: { name, arguments: piece = "" } = {} }) =>
            ({ index: at, id: callId, name, arguments: piece })),
          numTokens: Number.parseInt(entries[index], 10) || 0,
        };
        if (hasNews(event)) answer._push(event);
        if (reason) {
          answer._push({ type: "finished", index, finishReason: reason, stopReason, cause: "", numTokens: event.numTokens });
        }
      }
      if (answer._queue.length >= MAX_QUEUED) await new Promise((resolve) => { answer._drained = resolve; });
    }
    return false;
  }
}

const hasNews = ({ text, reasoning, toolCalls }) => Boolean(text || reasoning || toolCalls.length);

/** An event's id → [stream id, place]. */
function cut(id) {
  const dot = id.indexOf(".");
  return [id.slice(0, dot), id.slice(dot + 1)];
}

/** Not found, not allowed, not valid: asking again changes nothing. */
function isWorthRetrying(error) {
  if (error.isFinal) return false;
  return !(error instanceof StreamKVError) || error.status === 0 || error.status === 429 || error.status >= 502;
}

/** One WebSocket and the answers that share it. Mended when it breaks while any of them lives. */
class SharedSocket {
  constructor(client) {
    this._client = client;
    this.apiKey = client.apiKey;
    this.isClosed = false;
    this._live = new Map(); // id → { answer, request }: request is null once the server has named the stream
    this._numbers = 0;
    this._socket = null;
    this._attempt = 0;
    this._lostAtMs = 0;
    this._connect();
  }

  add(answer, request) {
    const id = `a${++this._numbers}`;
    const entry = { answer, request, isCancelled: false };
    this._live.set(id, entry);
    answer._stop = () => {
      if (entry.isCancelled) return;
      entry.isCancelled = true;
      if (!this._send({ type: "cancel", id })) this._finish(id);
    };
    answer._onBacklog = (isLong) => this._send({ type: isLong ? "pause" : "resume", id });
    if (this._socket.readyState === WebSocket.OPEN) this._begin(id, entry);
  }

  close() {
    this.isClosed = true;
    this._socket.close();
    for (const id of [...this._live.keys()]) this._finish(id);
  }

  _connect() {
    const url = this._client.url("v1/stream");
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const protocols = ["streamkv.json"];
    if (this.apiKey) protocols.push(`streamkv.key.${this.apiKey}`);
    const socket = this._socket = new WebSocket(url, protocols);
    let wasOpen = false;
    socket.onopen = () => {
      wasOpen = true;
      for (const [id, entry] of this._live) this._begin(id, entry);
    };
    socket.onmessage = ({ data }) => this._take(JSON.parse(data));
    socket.onclose = () => this._lost(wasOpen);
  }

  _begin(id, { answer, request }) {
    if (answer._streamId === null) this._send({ type: "generate", id, attach_grace_s: answer.cursor.graceS, ...request });
    else this._send({ type: "attach", id, stream_id: answer._streamId, ...(answer._place && { cursor: answer._place }) });
  }

  _send(message) {
    if (this._socket.readyState !== WebSocket.OPEN) return false;
    this._socket.send(JSON.stringify(message));
    return true;
  }

  _finish(id, failure = null) {
    const entry = this._live.get(id);
    if (!entry) return;
    this._live.delete(id);
    entry.answer._end(failure);
  }

  _take(event) {
    const entry = this._live.get(event.id);
    if (!entry) return;
    const { answer } = entry;
    switch (event.type) {
      case "started":
        if (this._lostAtMs) answer._push({ type: "reconnected" });
        this._attempt = 0;
        answer._streamId = event.stream_id;
        answer._place ||= Array.from({ length: event.n }, () => "-").join(",");
        answer._push({
          type: "started", streamId: event.stream_id, model: event.model, numPromptTokens: event.num_prompt_tokens,
        });
        break;
      case "delta": {
        this._lostAtMs = 0;
        const { index, text, num_tokens: numTokens, cursor = String(numTokens), reasoning = "", tool_calls: toolCalls = [] } = event;
        answer._stand(index, cursor);
        if (text || reasoning || toolCalls.length) answer._push({ type: "delta", index, text, reasoning, toolCalls, numTokens });
        break;
      }
      case "finished":
        answer._stand(event.index, event.cursor ?? `${event.num_tokens}e`);
        answer._push({
          type: "finished", index: event.index, finishReason: event.finish_reason, stopReason: event.stop_reason,
          cause: event.cause, numTokens: event.num_tokens,
        });
        break;
      case "done":
        answer._push({ type: "done", usage: event.usage });
        this._finish(event.id);
        break;
      case "error": {
        const error = toError(event.error);
        if (answer._streamId !== null && error.status === 503) this._again(event.id, error);
        else this._finish(event.id, error);
        break;
      }
    }
  }

  /** An attach came while the server has no engine: ask again. */
  async _again(id, error) {
    const waitS = Math.max(error.retryAfterS ?? 0, delayS(this._attempt++));
    const socket = this._socket;
    await sleep(waitS);
    const entry = this._live.get(id);
    if (entry && this._socket === socket) this._begin(id, entry); // a newer socket begins all that live itself
  }

  async _lost(wasOpen) {
    if (this.isClosed) return;
    for (const [id, { answer, isCancelled }] of [...this._live]) {
      if (isCancelled) this._finish(id);
      else if (answer._streamId === null && wasOpen) {
        this._finish(id, new StreamKVError("the connection broke off before the server had taken the request"));
      }
    }
    if (this._live.size && !wasOpen && this._attempt === 0) {
      // A handshake that fails tells a page nothing; the same key on a plain request does.
      const reason = await this._client.getJson("v1/models").then(() => null, (error) => error);
      if (reason && !isWorthRetrying(reason)) return this._giveUp(reason);
    }
    this._lostAtMs ||= performance.now();
    const lostForS = (performance.now() - this._lostAtMs) / 1000;
    for (const [id, { answer }] of [...this._live]) {
      const isNew = answer._streamId === null;
      if (lostForS > (isNew ? LONGEST_DELAY_S : answer.cursor.graceS)) {
        this._finish(id, new StreamKVError("the server cannot be reached"));
      }
    }
    if (!this._live.size) {
      this.isClosed = true;
      return;
    }
    const waitS = delayS(this._attempt++);
    for (const { answer } of this._live.values()) {
      answer._push({ type: "reconnecting", attempt: this._attempt, delayS: waitS });
    }
    await sleep(waitS);
    if (!this.isClosed) this._connect();
  }

  _giveUp(error) {
    this.isClosed = true;
    for (const id of [...this._live.keys()]) this._finish(id, error);
  }
}
