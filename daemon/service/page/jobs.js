// Jobs, and every protection with what became of it.

import { get } from "./api.js";
import { card, chip, empty, h, simulatedTag, subjectLink, table } from "./dom.js";
import { ago, clockTime, duration, percent, seconds } from "./format.js";

const ENDED = ["completed", "declined", "failed", "escalated"];

export function jobsView(main) {
  const jobs = h("div", {});
  const list = h("div", {});
  main.append(h("div", { class: "head" }, h("h1", {}, "Jobs and protections")), card("Jobs", null, jobs), card("Protections", h("span", { class: "note" }, "newest first"), list));
  return {
    async refresh() {
      const [registered, reporting, made] = await Promise.all([get("v1/jobs"), get("v1/progress"), get("v1/protections", { limit: 100 })]);
      const others = (reporting.items || []).filter((item) => !item.registered).map((item) => ({ job: item.job, progress: item, other: true }));
      jobs.replaceChildren(
        table(
          [
            ["Job", (item) => [h("b", {}, item.job), " ", simulatedTag(item.progress)]],
            ["Devices", (item) => countOf(item), "num"],
            ["Save costs", (item) => (item.other ? "" : duration(item.measured_checkpoint_seconds ?? item.checkpoint_seconds)), "num"],
            ["Restart costs", (item) => (item.other ? "" : duration(item.restart_seconds)), "num"],
            ["Last checkpoint", (item) => (item.other ? "" : item.last_checkpoint ? ago(item.last_checkpoint) : "never told")],
            ["Progress", (item) => progressOf(item.progress)],
            ["Webhook", (item) => (item.other ? h("span", { class: "muted" }, "not registered: it is watched, not protected") : webhookOf(item))],
          ],
          [...(registered.items || []), ...others],
          "No job is registered. A controller registers its job, or PUT /v1/jobs/NAME does.",
        ),
      );
      const items = made.items || [];
      list.replaceChildren(items.length ? h("ul", { class: "list" }, items.map((item) => protectionItem(item, false))) : empty("No protection so far."));
    },
  };
}

function countOf(item) {
  if (item.other) return `${item.progress.ranks} ranks`;
  const nodes = Array.isArray(item.nodes) ? item.nodes.length : 0;
  const devices = Array.isArray(item.devices) ? item.devices.length : 0;
  return [nodes ? `${nodes} nodes` : "", devices ? `${devices} devices` : ""].filter(Boolean).join(", ") || "none";
}

const FINDINGS = { straggler: "a rank lags", slow_job: "slower than before", stalled: "no progress", spike: "loss spike", not_a_number: "loss is NaN" };

// What the ranks tell of their steps; the device that stands out is named and linked.
function progressOf(progress) {
  if (!progress) return h("span", { class: "muted" }, "not told");
  const step = progress.step === null ? "" : `step ${progress.step}`;
  const time = Number.isFinite(progress.iteration_seconds) ? `${progress.iteration_seconds.toPrecision(3)} s a step` : "";
  const found = [progress.finding, progress.loss_finding].filter((name) => FINDINGS[name]);
  const level = progress.finding === "stalled" ? "critical" : "warning";
  return h(
    "div",
    {},
    h("div", { class: "num" }, [step, time].filter(Boolean).join(", ")),
    found.map((name) => chip(level, FINDINGS[name])),
    progress.in_marked_phase ? chip("", "saves or evaluates") : null,
    (progress.devices || []).slice(0, 3).map((device) => [" ", /\/gpu\d+$/.test(device) ? subjectLink(device) : h("span", { class: "mono" }, device)]),
    found.length ? h("div", { class: "muted" }, progress.reason || progress.loss_reason) : null,
  );
}

function webhookOf(item) {
  if (item.webhook_disabled) return chip("warning", `off: ${item.webhook_disabled}`);
  const url = item.webhook_url;
  return url ? h("span", { class: "mono muted" }, url) : "none";
}

export function protectionItem(item, short) {
  const own = `${item.device}: `;
  const reasons = (item.reasons || [])
    .map((reason) => (typeof reason === "string" ? reason : reason.text))
    .filter(Boolean)
    .map((text) => (text.startsWith(own) ? text.slice(own.length) : text));
  const chance = typeof item.risk === "number" ? item.risk : item.chance;
  return h(
    "li",
    {},
    h("div", { class: "head" }, h("b", {}, item.job), chip(item.state), item.dry_run ? chip("", "dry run") : null, simulatedTag(item), h("span", { class: "muted nowrap end" }, ago(item.created))),
    h("div", {}, `Asked to ${actionName(item.action)}${Number.isFinite(chance) ? `; chance of a failure ${percent(chance)}` : ""}`),
    h("div", {}, item.device ? ["because of ", subjectLink(item.device), reasons.length ? ": " : ""] : null, h("span", { class: "muted" }, reasons.slice(0, short ? 1 : 3).join("; "))),
    timeline(item),
    !short && item.checkpoint ? h("p", { class: "muted" }, "Checkpoint ", h("code", {}, item.checkpoint)) : null,
    item.answer ? h("p", { class: "muted" }, item.answer) : null,
  );
}

function actionName(action) {
  return { checkpoint: "save a checkpoint", checkpoint_and_drain: "save and move off the node", drain: "move off the node" }[action] || action || "";
}

function timeline(item) {
  const created = seconds(item.created);
  const after = (time) => (seconds(time) === null || created === null ? "" : `+${duration(Math.max(0, seconds(time) - created))}`);
  const ended = ENDED.includes(item.state);
  const closed = item.closed ?? (item.state === "completed" && item.save_seconds !== null ? null : undefined);
  const saved = [item.step !== null && item.step !== undefined ? `step ${item.step}` : "", item.save_seconds !== null && item.save_seconds !== undefined ? `in ${duration(item.save_seconds)}` : ""].filter(Boolean).join(" ");
  const steps = [
    ["Requested", clockTime(item.created), "yes"],
    ["Accepted", item.acknowledged ? after(item.acknowledged) : ended ? "" : "waiting", item.acknowledged ? "yes" : "no"],
    [ended ? item.state[0].toUpperCase() + item.state.slice(1) : "Completed", ended ? [saved, closed ? after(closed) : ""].filter(Boolean).join(", ") : `due ${clockTime(item.deadline)}`, ended ? (item.state === "completed" ? "yes" : "bad") : "no"],
  ];
  return h("ol", { class: "steps" }, steps.map(([name, note, done]) => h("li", { "data-done": done }, name, h("small", { class: "num" }, note))));
}
