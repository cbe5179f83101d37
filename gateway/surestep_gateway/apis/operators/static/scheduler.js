// One scheduler: how it is, its ranks, its steps, its drafts.

import { HISTORY_S, bars, faultLane, lane, line } from "./charts.js";
import { h } from "./dom.js";
import { bands } from "./faults.js";
import { ago, bytes, count, percent, rankState, rate, schedulerState, seconds, several } from "./words.js";

const WINDOWS_S = [10, 8, 6, 5, 4, 3, 2]; // of the timeline of steps
const KEPT = 512; // steps that the server remembers
const LISTED = 12; // steps in its table

/** The section of a scheduler. */
export function schedulerPanel(scheduler, index) {
  const { address, engine } = scheduler;
  const state = schedulerState(scheduler);
  const title = `scheduler-${index}`;
  return h(
    "section",
    { class: "panel scheduler", "aria-labelledby": title },
    h(
      "header",
      {},
      h("h2", { id: title }, `${scheduler.serves}, scheduler ${address}`),
      h("p", { class: `state ${state.tone}` }, state.text),
      engine && h("p", { class: "note" }, open(engine)),
      h("p", { class: "note" }, modelText(scheduler.model)),
    ),
    state.more && h("p", { class: `says ${state.tone}` }, state.more),
    engine && ranks(engine),
    history(scheduler),
    engine && timeline(scheduler),
    speculation(scheduler),
    adapters(scheduler.figures.adapters),
  );
}

function open(engine) {
  const replaying = engine.replaying_requests ? `, ${engine.replaying_requests} of them replaying` : "";
  return `epoch ${engine.epoch}, ${several(engine.open_requests, "open request")}${replaying}`;
}

function modelText(model) {
  if (model === null) return "";
  const name = model.path.split("/").filter(Boolean).at(-1) ?? model.path;
  const kind = model.headless ? ", makes vectors and writes no text" : "";
  return `${name}, ${model.dtype} on ${model.device}, up to ${count(model.max_model_len)} tokens${kind}`;
}

function ranks(engine) {
  if (engine.ranks.length === 0) return h("p", { class: "block note" }, "No rank and no supervisor answers.");
  const heads = ["Rank", "State", "Epoch", "Last step", "Restarts", "Weights", "KV cache"];
  return h(
    "div",
    { class: "block" },
    h(
      "table",
      { class: "ranks", role: "table" },
      h("caption", { class: "unseen" }, "Ranks"),
      h("thead", {}, h("tr", { role: "row" }, heads.map((head, i) =>
        h("th", { scope: "col", role: "columnheader", class: i > 1 ? "number" : null }, head)))),
      h("tbody", {}, engine.ranks.map(rankRow)),
    ),
  );
}

function rankRow(rank) {
  const state = rankState(rank);
  const ended = rank.exits[0];
  const number = (label, text) => h("td", { class: "number", role: "cell", "data-label": label }, text);
  return h(
    "tr",
    { role: "row" },
    h("th", { scope: "row", role: "rowheader" }, `rank ${rank.rank}`),
    h(
      "td",
      { role: "cell" },
      h("span", { class: `state ${state.tone}` }, state.text),
      h("span", { class: "told" }, rankText(rank, state)),
      ended && h("span", { class: "told" }, `${ago(ended.age_s)}: pid ${ended.pid} ended, ${ended.reason}${
        ended.replaced_s === null ? "" : `; replaced in ${seconds(ended.replaced_s)}`}`),
    ),
    number("Epoch", rank.epoch ? count(rank.epoch) : "–"),
    number("Last step", rank.step && rank.lost === undefined ? ago(rank.step_age_s) : "–"),
    number("Restarts", count(rank.restarts)),
    number("Weights", rank.weight_bytes === null ? "–" : bytes(rank.weight_bytes)),
    number("KV cache", rank.kv_cache_bytes === null ? "–" : bytes(rank.kv_cache_bytes)),
  );
}

function rankText(rank, state) {
  const beat = rank.heartbeat_age_s !== null && rank.heartbeat_age_s >= 1 && rank.state === "READY";
  const parts = [
    rank.pid ? `pid ${rank.pid}` : "",
    state.more + (state.more && beat ? ` for ${seconds(rank.heartbeat_age_s)}` : ""),
    rank.standby ? "a standby waits" : "",
  ];
  return parts.filter(Boolean).join(", ");
}

function history(scheduler) {
  const { age_s, output_tok_s } = scheduler.history;
  if (age_s.length === 0) return null;
  const most = Math.max(1, ...output_tok_s);
  const faults = bands(scheduler).filter(([, end]) => end < HISTORY_S).length;
  return h(
    "div",
    { class: "block" },
    h("h3", {}, "Output, last three minutes", h("span", {}, `at most ${rate(most)} tokens/s${faults ? `, ${several(faults, "fault")} marked` : ""}`)),
    line(age_s.map((age, i) => [age, output_tok_s[i]]), bands(scheduler), { most, height: 76, kind: "wide" }),
    h("p", { class: "axis", "aria-hidden": "true" }, h("span", {}, "3 min ago"), h("span", {}, "now")),
  );
}

/** Rows of the columns that the server sends, oldest first. */
function stepsOf(columns) {
  return columns.age_s.map((age, i) => ({
    age,
    took: columns.took_s[i],
    step: columns.step[i],
    prompt: columns.prompt_rows[i],
    decode: columns.decode_rows[i],
    verify: columns.verify_rows[i],
    emitted: columns.emitted[i],
    accepted: columns.accepted[i],
  }));
}

/** Seconds that the timeline shows: no more than the steps that are known cover. */
function span(steps) {
  if (steps.length < KEPT) return WINDOWS_S[0];
  return WINDOWS_S.find((window) => window <= steps[0].age) ?? 1;
}

function timeline(scheduler) {
  const all = stepsOf(scheduler.engine.steps);
  const windowS = span(all);
  const steps = all.filter((step) => step.age < windowS);
  const most = Math.max(1, ...steps.map((step) => step.prompt + step.decode + step.verify));
  const lanes = [
    ["prefill", (step) => step.prompt, "quiet"],
    ["decode", (step) => step.decode, "quiet"],
    ["verify", (step) => step.verify, ""],
  ];
  return h(
    "div",
    { class: "block" },
    h("h3", {}, `Steps, last ${several(windowS, "second")}`, h("span", {}, stepsText(steps))),
    h(
      "div",
      { class: "lanes" },
      lanes.flatMap(([name, rows, kind]) => [
        h("span", { class: "name" }, name),
        lane(steps, rows, most, windowS, kind),
      ]),
      h("span", { class: "name" }, "faults"),
      faultLane(bands(scheduler), windowS),
      h("p", { class: "axis", "aria-hidden": "true" }, h("span", {}, `${windowS} s ago`), h("span", {}, "now")),
    ),
    stepTable(all.slice(-LISTED).reverse()),
  );
}

function stepsText(steps) {
  if (steps.length === 0) return "none";
  const emitted = steps.reduce((total, step) => total + step.emitted, 0);
  return `${several(steps.length, "step")}, ${several(emitted, "token")}`;
}

function stepTable(steps) {
  if (steps.length === 0) return null;
  const heads = ["step", "ended", "took", "prefill", "decode", "verify", "tokens", "of them drafts"];
  const row = (step) => [
    step.step, ago(step.age), seconds(step.took), step.prompt, step.decode, step.verify, step.emitted, step.accepted,
  ];
  return h(
    "details",
    { class: "table" },
    h("summary", {}, "The latest steps as a table"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The latest steps" }, h(
      "table",
      {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, steps.map((step) => h("tr", {}, row(step).map((cell) => h("td", {}, cell))))),
    )),
  );
}

/** What drafts are worth, by their source and the number of requests in a step. */
function drafting(sizes) {
  if (sizes.length === 0) return null;
  const heads = ["drafts", "requests", "worth", "made", "compared"];
  const row = (size) => [
    size.source === "looked_up" ? "looked up" : "proposed",
    size.rows === 1 ? "1" : `up to ${size.rows}`,
    `${size.value.toFixed(2)} times`,
    size.drafts ? "yes" : "no",
    several(size.trials, "time"),
  ];
  return h("div", { class: "table" },
    h("h3", {}, "Whether drafts pay", h("span", {}, "tokens a second, of those without")),
    h("table", {},
      h("caption", { class: "unseen" }, "Whether drafts pay, by the requests in a step"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, sizes.map((size) => h("tr", {}, row(size).map((cell) => h("td", {}, cell))))),
    ));
}

/** The adapters that are loaded, and what has them. */
function adapters(loaded) {
  if (loaded.length === 0) return null;
  const heads = ["adapter", "running", "waiting", ""];
  const row = (one) => [one.name, count(one.running), count(one.waiting), one.leaving ? "unloaded when its requests have ended" : ""];
  return h("div", { class: "block table" },
    h("h3", {}, "Adapters", h("span", {}, `${several(loaded.length, "place")} taken`)),
    h("table", {},
      h("caption", { class: "unseen" }, "Adapters, and requests that have them"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, loaded.map((one) => h("tr", {}, row(one).map((cell) => h("td", {}, cell))))),
    ));
}

function drafter({ drafter, max_draft_tokens, drafts_because }) {
  const why = drafts_because && ` (${drafts_because})`;
  return `Drafter ${drafter}${why}, up to ${several(max_draft_tokens, "draft")} a step`;
}

function speculation({ model, figures }) {
  if (model === null || model.headless) return null;
  if (model.drafter_fault) {
    return h("div", { class: "block" }, h("p", { class: "says" }, "The model is served without speculation, since its drafter cannot be used."),
      h("p", { class: "note" }, model.drafter_fault));
  }
  if (!model.drafter) {
    return h("p", { class: "block note" }, "No drafter: each token takes a step of its own. ",
      h("code", {}, "--speculative-config"), " turns speculation on; it changes no token.");
  }
  const suspended = figures.speculation_suspended &&
    h("p", { class: "says" }, "Drafts are suspended: almost none were accepted, or the drafter failed. It is tried again by itself.");
  if (figures.windows === 0) {
    return h("div", { class: "block" }, suspended, h("p", { class: "note" }, `${drafter(model)}; nothing has been drafted yet.`));
  }
  const at = figures.accepted_at.map((accepted, i) => {
    const share = accepted / Math.max(1, figures.drafted_at[i] ?? figures.windows);
    return { label: `draft ${i + 1}`, value: share, text: percent(share) };
  });
  const lengths = figures.windows_by_accepted.map((windows, accepted) => {
    const share = windows / figures.windows;
    return { label: `${accepted} accepted`, value: share, text: percent(share) };
  });
  const mean = 1 + figures.accepted / figures.windows;
  return h(
    "div",
    { class: "block" },
    suspended,
    h(
      "div",
      { class: "pair" },
      h("div", {}, h("h3", {}, "Accepted, by position of the draft"),
        bars("Accepted, by position of the draft", at, 1, ["position", "accepted"])),
      h("div", {}, h("h3", {}, "Windows, by drafts accepted", h("span", {}, `${mean.toFixed(2)} tokens each`)),
        bars("Windows, by drafts accepted", lengths, Math.max(...lengths.map((row) => row.value)), ["accepted", "windows"])),
    ),
    drafting(figures.drafting),
    h("p", { class: "note" }, `${drafter(model)}; figures since the scheduler was started.`),
  );
}
