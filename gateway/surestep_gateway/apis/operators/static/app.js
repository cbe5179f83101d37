// Looks once a second, while the page is visible, and shows what it sees.

import { hasKey, overview, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h, show } from "./dom.js";
import { faultList, faultsOf } from "./faults.js";
import { clientTiles } from "./clients.js";
import { tiles } from "./now.js";
import { schedulerPanel } from "./scheduler.js";
import { ago, gatewayState, outdated, schedulerState } from "./words.js";

const INTERVAL_MS = 1000;
const LATE_MS = 3000; // without an answer: what was seen last may not hold any more

const chat = new Chat();
let timer = null;
let looking = false;
let seen = null; // what was announced last
let at = null; // when the figures were last renewed
let last = null; // what they were renewed from

async function look() {
  clearTimeout(timer);
  if (looking || document.hidden) return;
  looking = true;
  try {
    last = await overview();
    at = new Date();
    render(last);
    announce(last.schedulers);
    problem(null);
  } catch (error) {
    problem(error);
  } finally {
    looking = false;
  }
  if (!document.hidden) timer = setTimeout(look, INTERVAL_MS);
}

function render(document_) {
  const { gateway, clients, schedulers } = document_;
  const state = gatewayState(gateway, clients);
  const names = gateway.models.join(", ");
  document.title = `${{ bad: "! ", unknown: "? " }[state.tone] ?? ""}${names} · Surestep`;
  byId("main").classList.toggle("outdated", gateway.lost !== undefined);
  show(
    byId("server"),
    h("b", {}, names),
    h("span", { class: `state ${state.tone}` }, state.text),
    state.more && h("span", {}, state.more),
    h("span", {}, `${gateway.address}, version ${gateway.version}`),
  );
  show(byId("now"), tiles(document_));
  show(byId("clients"), clientTiles(document_));
  show(byId("schedulers"), schedulers.map(schedulerPanel));
  show(byId("faults"), faultList(schedulers));
  chat.serve(gateway.models, schedulers.some(({ model }) => model?.headless));
}

const age = () => (Date.now() - at) / 1000;

/** Show what was known last as what it is: known no more. */
function showOutdated() {
  if (at !== null && !document.hidden) render(outdated(last, age()));
}

/** Tell those who hear the page of faults and of their ends, and of nothing else. */
function announce(schedulers) {
  const faults = new Map(faultsOf(schedulers).map((fault) => [`${fault.key} ${fault.what}`, fault]));
  const states = schedulers.map((one) => `Scheduler ${one.address}: ${schedulerState(one).text}.`);
  if (seen !== null) {
    const fresh = [...faults].filter(([key]) => !seen.faults.has(key)).map(([, fault]) => `${fault.what}.`);
    const changed = states.filter((state, i) => state !== seen.states[i]);
    if (fresh.length || changed.length) byId("announce").textContent = [...fresh, ...changed].join(" ");
  }
  seen = { faults: new Set(faults.keys()), states };
}

function problem(error) {
  const banner = byId("problem");
  byId("links").hidden = hasKey(); // a link cannot carry it
  if (error === null) {
    banner.hidden = true;
    byId("key-said").textContent = hasKey() ? "The server accepts it." : "";
    return;
  }
  if (error.kind) showOutdated();
  const old = at === null ? "" : ` The figures are those of ${at.toLocaleTimeString()}, ${ago(age())}.`;
  const hope = error.kind === "away" ? " It is asked again every second." : "";
  const text = error.kind ? `${error.message}${hope}${old}` : `This page failed: ${error.message}`;
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = false;
  if (error.kind === "key") {
    byId("key-said").textContent = error.message;
    if (at === null && !byId("key").open) byId("key").open = true;
  }
  if (at === null) show(byId("now"));
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-field").value);
  byId("key-field").value = "";
  byId("key").open = false;
  void look();
});
byId("key").addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    byId("key").open = false;
    byId("key").querySelector("summary").focus();
  }
});
document.addEventListener("visibilitychange", () => void look());
setInterval(() => {
  if (at !== null && Date.now() - at > LATE_MS) showOutdated(); // also while an answer is awaited
}, INTERVAL_MS);
void look();
