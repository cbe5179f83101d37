// A conversation with the model. Each event of its stream has tokens of one kind: drafted or not.

import { Problem, chat } from "./api.js";
import { byId, h, show } from "./dom.js";
import { Marked, markdown } from "./markdown.js";
import { rate, seconds, several } from "./words.js";

const STALL_MS = 1500; // without a token: the reader is told that the answer goes on
const MOST_MESSAGES = 200;
const LEAST_WAIT_MS = 16; // between two drawings of an answer
const SHARE = 4; // of the time that is not spent on drawing, to that which is

/** The chat box of the page. */
export class Chat {
  #messages = [];
  #abort = null; // of the answer on its way
  #model = null;

  constructor() {
    const prompt = byId("prompt");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#abort) this.#abort.abort();
      else void this.#send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.#abort) void this.#send();
      }
    });
    byId("new-chat").addEventListener("click", () => this.#restart());
  }

  /** What is served: names that requests may carry, and whether anything writes text. */
  serve(names, headless) {
    this.#model = names[0] ?? null;
    byId("prompt").disabled = byId("send").disabled = headless;
    if (headless) byId("hint").textContent = "This model makes vectors and writes no text.";
  }

  #restart() {
    this.#abort?.abort();
    this.#messages = [];
    byId("talk").replaceChildren(byId("hint"));
    byId("hint").hidden = false;
    byId("prompt").focus();
  }

  async #send() {
    const text = byId("prompt").value.trim();
    if (!text) return;
    byId("prompt").value = "";
    byId("hint").hidden = true;
    const messages = this.#messages;
    messages.push({ role: "user", content: text });
    turn("user", "You", h("p", { class: "said" }, text));
    const answer = new Answer(this.#model);
    this.#abort = new AbortController();
    byId("send").textContent = "Stop";
    try {
      for await (const event of chat(this.#request(messages), this.#abort.signal)) answer.take(event);
      answer.end();
    } catch (error) {
      answer.end(error);
    }
    this.#abort = null;
    byId("send").textContent = "Send";
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // who asks again asks once
  }

  #request(messages) {
    const body = {
      messages: messages.slice(-MOST_MESSAGES),
      stream: true,
      stream_options: { include_usage: true },
      speculative: { return_drafted: true },
    };
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const fields = { max_tokens: number("max-tokens"), temperature: number("temperature"), seed: number("seed") };
    for (const [name, value] of Object.entries(fields)) if (value !== null) body[name] = value;
    if (byId("drafts").value !== "") body.speculative.num_tokens = Number(byId("drafts").value);
    if (this.#model) body.model = this.#model;
    return body;
  }
}

function turn(kind, who, ...inside) {
  const talk = byId("talk");
  const element = h("article", { class: `turn ${kind}` }, h("h3", { class: "who" }, who), inside);
  talk.append(element);
  talk.scrollTop = talk.scrollHeight;
  return element;
}

/** One answer, as it comes. */
class Answer {
  text = "";
  #marks = ""; // of each character: d(rafted) or p(lain)
  #said = h("div", { class: "said written" });
  #drawing = null; // the timer of the next drawing
  #cost = 0; // of the last one, ms
  #thought = h("p", { class: "thought", hidden: true });
  #foot = h("p", { class: "foot" }, "Waiting for the first token …");
  #began = performance.now();
  #first = null; // when the first token came
  #last = null; // and the newest
  #pause = 0; // the longest between two
  #tokens = 0;
  #drafted = 0;
  #reason = "";
  #turn;
  #timer;

  constructor(model) {
    this.#turn = turn("assistant", model ?? "Model", this.#thought, this.#said, this.#foot);
    this.#turn.setAttribute("aria-busy", "true");
    this.#timer = setInterval(() => this.#watch(), 250);
  }

  /** An event of the stream. */
  take(event) {
    const choice = event.choices[0];
    if (choice === undefined) {
      if (event.usage) this.#tokens = event.usage.completion_tokens;
      return;
    }
    const { content, reasoning } = choice.delta;
    let drafted = choice.drafted ?? [];
    // An older scheduler does not say which were drafted, and how many they are only at the end.
    if (drafted.length === 0 && (content || reasoning)) drafted = [false];
    if (drafted.length) this.#came(drafted);
    const isDraft = drafted[0] === true;
    if (reasoning) {
      following(() => {
        this.#thought.hidden = false;
        say(this.#thought, reasoning, isDraft);
      });
    }
    if (content) {
      this.text += content;
      this.#marks += (isDraft ? "d" : "p").repeat(content.length);
      this.#drawing ??= setTimeout(() => this.#draw(), Math.max(LEAST_WAIT_MS, SHARE * this.#cost));
    }
    if (choice.finish_reason) this.#reason = choice.finish_reason;
  }

  /** Show what has come; a long answer is drawn less often. */
  #draw() {
    clearTimeout(this.#drawing);
    this.#drawing = null;
    const began = performance.now();
    following(() => show(this.#said, markdown(new Marked(this.text, this.#marks))));
    this.#cost = performance.now() - began;
  }

  #came(drafted) {
    const now = performance.now();
    if (this.#last !== null) this.#pause = Math.max(this.#pause, now - this.#last);
    this.#first ??= now;
    this.#last = now;
    this.#tokens += drafted.length;
    this.#drafted += drafted.filter(Boolean).length;
    this.#foot.textContent = this.#figures();
  }

  #watch() {
    const silent = performance.now() - (this.#last ?? this.#began);
    if (silent < STALL_MS) return;
    const waits = `no token for ${seconds(silent / 1000)}`;
    this.#foot.textContent = this.#last === null
      ? `Waiting for the first token, ${seconds(silent / 1000)} …`
      : `${this.#figures()}; ${waits}, the answer goes on as soon as the workers do`;
  }

  #figures() {
    const time = (this.#last - this.#first) / 1000;
    const speed = time > 0 ? `, ${rate((this.#tokens - 1) / time)} a second` : "";
    const steps = this.#tokens - this.#drafted; // each adds one token of its own
    const drafts = this.#drafted ? `, ${this.#drafted} of them drafted: ${(this.#tokens / Math.max(1, steps)).toFixed(1)} a step` : "";
    return `${several(this.#tokens, "token")}${speed}${drafts}`;
  }

  /** No more comes; with an `error` because of that. */
  end(error) {
    clearInterval(this.#timer);
    this.#draw();
    this.#turn.removeAttribute("aria-busy");
    const parts = this.#tokens ? [this.#figures()] : [];
    if (this.#first !== null) parts.push(`first after ${seconds((this.#first - this.#began) / 1000)}`);
    if (this.#pause > STALL_MS) parts.push(`longest pause ${seconds(this.#pause / 1000)}`);
    if (this.#reason === "length") parts.push("cut at the most tokens");
    if (error?.name === "AbortError") parts.push("stopped");
    this.#foot.textContent = parts.join("; ");
    if (error && error.name !== "AbortError") {
      const text = error instanceof Problem ? error.message : `This page failed: ${error.message}`;
      this.#turn.append(h("p", { class: "wrong", role: "alert" }, text));
    }
  }
}

/** Change the conversation; a reader who is at its end stays there. */
function following(change) {
  const talk = byId("talk");
  const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  change();
  if (follows) talk.scrollTop = talk.scrollHeight;
}

/** Add text of one kind, to the last piece if that is of this kind. */
function say(where, text, drafted) {
  const last = where.lastElementChild;
  if (last && (last.className === "drafted") === drafted) last.firstChild.appendData(text);
  else where.append(h("span", drafted ? { class: "drafted" } : {}, text));
}
