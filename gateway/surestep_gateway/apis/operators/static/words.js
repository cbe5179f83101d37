// Numbers and states in words for people.

const whole = new Intl.NumberFormat("en");

/** 12,345; 1.2 million. */
export function count(number) {
  return number < 1e6 ? whole.format(Math.round(number)) : `${(number / 1e6).toFixed(1)} million`;
}

/** Three digits that matter. */
export function rate(number) {
  if (number >= 100) return whole.format(Math.round(number));
  return number >= 10 ? number.toFixed(1) : number.toFixed(number === 0 ? 0 : 2);
}

/** 0 to 1, in hundredths; never 100 % or 0 % of what is not quite that. */
export function percent(share) {
  const hundredths = Math.round(100 * share);
  if (share > 0 && hundredths === 0) return "< 1 %";
  return `${share < 1 ? Math.min(hundredths, 99) : hundredths} %`;
}

/** A duration. */
export function seconds(time) {
  if (time < 0.9995) return `${(1000 * time).toFixed(time < 0.00995 && time > 0 ? 1 : 0)} ms`;
  if (time < 9.95) return `${time.toFixed(1)} s`;
  if (time < 119.5) return `${Math.round(time)} s`;
  return time < 7200 ? `${Math.round(time / 60)} min` : `${(time / 3600).toFixed(1)} h`;
}

/** How long ago. */
export const ago = (age) => (age < 1 ? "now" : `${age < 60 ? `${Math.floor(age)} s` : seconds(age)} ago`);

/** A size in memory. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = number > 0 ? Math.min(4, Math.floor(Math.log10(number) / 3)) : 0;
  const value = number / 10 ** (3 * power);
  return `${value >= 100 || power === 0 ? Math.round(value) : value.toFixed(1)} ${units[power]}`;
}

/** "1 request", "2 requests". */
export const several = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

const CAUSES = {
  worker_exit: "A worker ended",
  worker_hang: "A worker hung",
  worker_error: "A worker failed",
  out_of_memory: "A worker ran out of memory",
  connection: "The connection to a worker broke",
  ledger: "Scheduler and worker disagreed on what had been done",
  digest: "The ranks did not compute the same",
  non_finite: "The model computed no numbers",
  drafter: "The drafter failed",
  operator: "An operator replaced the workers",
};

/** Why an epoch was lost. */
export const cause = (name) => CAUSES[name] ?? `Lost: ${name}`;

const PHASES = {
  LOADING: "loading the model",
  WARMING_UP: "warming up",
  IDLE: "idle",
  PREPARING: "preparing a step",
  DRAFTING: "drafting",
  FORWARD: "in the model",
  SAMPLING: "choosing tokens",
};

/** A document of the gateway's, once it does not answer any more: nobody knows what holds now. */
export function outdated(document_, age) {
  const schedulers = document_.schedulers.map((one) => {
    const engine = one.engine && { ...one.engine, ranks: one.engine.ranks.map((rank) => ({ ...rank, lost: age })) };
    return { ...one, engine, lost: age };
  });
  return { ...document_, gateway: { ...document_.gateway, lost: age }, schedulers };
}

const unknown = ({ text }, age) => ({ tone: "unknown", text: "unknown", more: `“${text}” when last seen, ${ago(age)}` });

/** What a rank is doing, and whether that is well: `tone` is "", "busy", "bad" or "unknown". */
export function rankState({ lost, ...rank }) {
  if (lost !== undefined) return unknown(rankState(rank), lost);
  if (rank.state === "READY") return { tone: "", text: "ready", more: PHASES[rank.phase] ?? "" };
  if (rank.state === "ASLEEP") return { tone: "busy", text: "asleep", more: "until an operator wakes it, or a request if the model comes and goes" };
  if (rank.failure) {
    const hope = rank.failure_is_permanent ? "something must be changed" : "it is tried again";
    return { tone: "bad", text: "cannot start", more: `${rank.failure} (${hope})` };
  }
  if (rank.state === "STARTING") {
    return { tone: "busy", text: "starting", more: PHASES[rank.phase] ?? "" };
  }
  return { tone: "bad", text: "gone", more: "it is being replaced" };
}

/** How a scheduler is, in a word and in a line. */
export function schedulerState({ lost, ...scheduler }) {
  if (lost !== undefined) return unknown(schedulerState(scheduler), lost);
  const { engine } = scheduler;
  if (engine === null) {
    const more = scheduler.outages.length
      ? "Its open requests go on elsewhere, or here when it is back."
      : "It has not answered yet: it may still be starting.";
    return { tone: "bad", text: "does not answer", more: `${sentence(scheduler.trouble)}${more}` };
  }
  switch (engine.state) {
    case "SERVING":
      if (scheduler.circuit_breaker !== "CLOSED") {
        const more = "Calls to it failed several times in a row. It is tried again after a pause.";
        return { tone: "bad", text: "left alone", more };
      }
      return { tone: "", text: "serving", more: "" };
    case "RECOVERING": {
      const more = "The workers are being replaced. Open requests wait and go on from where they are.";
      return { tone: "bad", text: "recovering", more: `${sentence(engine.waiting_for)}${more}` };
    }
    case "PAUSED":
    case "SLEEPING": {
      const more = scheduler.comes_and_goes
        ? "The next request wakes it."
        : `${sentence(engine.waiting_for)}Kept requests go on when one wakes it.`;
      return { tone: "busy", text: engine.state === "PAUSED" ? "paused" : "asleep", more };
    }
    case "DRAINING":
      return { tone: "busy", text: "draining", more: "It finishes open requests and takes no new ones." };
    default: {
      const loading = engine.ranks.some((rank) => rank.phase === "LOADING");
      const text = loading ? "loading the model" : "waiting for workers";
      return { tone: "busy", text, more: engine.waiting_for };
    }
  }
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."} ` : "";
}

const GATEWAY = {
  SERVING: { tone: "", text: "serving" },
  DRAINING: { tone: "busy", text: "shutting down: open requests finish, new ones are refused" },
  WAITING_FOR_SCHEDULER: { tone: "bad", text: "not serving: no scheduler takes requests" },
};

/** The same of the gateway: it may serve, and its answers fail. */
export function gatewayState({ lost, ...gateway }, clients) {
  if (lost !== undefined) return unknown(gatewayState(gateway, clients), lost);
  const state = GATEWAY[gateway.state] ?? { tone: "bad", text: gateway.state };
  const failed = failures(clients);
  if (failed === 0) return state;
  return { tone: "bad", text: `${state.text}; ${count(failed)} of ${several(clients.answers, "answer")} failed in the last minute` };
}

/** Answers of the last minute that ended in an error of the server. */
export const failures = (clients) => Object.values(clients.failed).reduce((total, number) => total + number, 0);
