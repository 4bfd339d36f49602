// What operators act on: alerts to acknowledge and silence, deliveries to retry, models.

import { get, send } from "./api.js";
import { card, chip, h, notice, simulatedTag, subjectLink, table } from "./dom.js";
import { ago, clockTime, duration, seconds } from "./format.js";

async function act(button, what, call, then) {
  button.disabled = true;
  try {
    await call();
    notice(what);
    await then();
  } catch (error) {
    notice(error.message);
  } finally {
    button.disabled = false;
  }
}

function action(text, what, call, then) {
  const button = h("button", { type: "button" }, text);
  button.addEventListener("click", () => act(button, what, call, then));
  return button;
}

export function alertsView(main) {
  const alerts = h("div", {});
  const silences = h("div", {});
  main.append(h("div", { class: "head" }, h("h1", {}, "Alerts")), card("Alerts", h("span", { class: "note" }, "open ones first"), alerts), card("Silences", null, silences));
  const view = {
    async refresh() {
      const [raised, quiet] = await Promise.all([get("v1/alerts", { state: "all", limit: 200 }), get("v1/silences", { limit: 200 })]);
      const items = [...(raised.items || [])].sort((a, b) => Boolean(a.resolved) - Boolean(b.resolved) || seconds(b.created) - seconds(a.created));
      alerts.replaceChildren(
        table(
          [
            ["Level", (item) => chip(item.resolved ? "resolved" : item.level, item.resolved ? "resolved" : item.level)],
            ["Alert", (item) => [h("b", {}, item.title), " ", simulatedTag(item), h("div", { class: "muted" }, item.reason)]],
            ["About", (item) => (item.device || item.node ? subjectLink(item.device || item.node) : item.job || "")],
            ["Raised", (item) => ago(item.created), "nowrap"],
            ["", (item) => alertActions(item, view)],
          ],
          items,
          "No alerts. That is as it should be.",
        ),
      );
      silences.replaceChildren(
        table(
          [
            ["About", (item) => item.device || item.node || item.job || "everything"],
            ["Until", (item) => clockTime(item.ends, true)],
            ["Reason", (item) => item.reason || ""],
            ["By", (item) => item.created_by || ""],
            ["", (item) => (Date.now() / 1000 >= seconds(item.ends) ? "ended" : action("End now", "Silence ended.", () => send("DELETE", `v1/silences/${encodeURIComponent(item.id)}`), view.refresh))],
          ],
          quiet.items || [],
          "No silences.",
        ),
      );
    },
  };
  return view;
}

function alertActions(item, view) {
  if (item.resolved) return "";
  const acknowledged = item.acknowledged ? h("span", { class: "muted" }, `acknowledged ${ago(item.acknowledged)} `) : action("Acknowledge", "Alert acknowledged.", () => send("POST", `v1/alerts/${encodeURIComponent(item.id)}/acknowledge`), view.refresh);
  const silence = h("button", { type: "button" }, "Silence");
  silence.addEventListener("click", async () => {
    const wanted = await askSilence(item);
    if (wanted) await act(silence, "Silenced.", () => send("POST", "v1/silences", wanted), view.refresh);
  });
  return h("span", { class: "nowrap" }, acknowledged, " ", silence);
}

function askSilence(item) {
  const dialog = document.getElementById("silence-dialog");
  const about = item.device ? { device: item.device } : item.node ? { node: item.node } : { job: item.job };
  const reason = document.getElementById("silence-reason");
  document.getElementById("silence-what").textContent = `No alerts for ${Object.values(about)[0]} for this long. Protections go on.`;
  reason.value = "";
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const ends = new Date(Date.now() + Number(document.getElementById("silence-hours").value) * 3600000).toISOString();
        resolve(dialog.returnValue === "use" ? { ...about, ends, reason: reason.value.trim() } : null);
      },
      { once: true },
    );
    dialog.returnValue = "cancel";
    dialog.showModal();
  });
}

export function deliveriesView(main) {
  const body = h("div", {});
  main.append(h("div", { class: "head" }, h("h1", {}, "Deliveries")), card("Webhooks", h("span", { class: "note" }, "newest first; each keeps its id over all attempts"), body));
  const view = {
    async refresh() {
      const answer = await get("v1/deliveries", { limit: 200 });
      body.replaceChildren(
        table(
          [
            ["State", (item) => chip(item.state)],
            ["Job", (item) => item.job],
            ["To", (item) => h("span", { class: "mono muted" }, item.url)],
            ["Attempts", (item) => String(item.attempts), "num"],
            ["Last answer", (item) => [item.last_status ? String(item.last_status) : "", item.last_error ? h("div", { class: "muted" }, item.last_error) : null]],
            ["Made", (item) => ago(item.created), "nowrap"],
            ["Took", (item) => (item.finished ? duration(seconds(item.finished) - seconds(item.created)) : ""), "num nowrap"],
            ["", (item) => (item.state === "dead" ? action("Retry", "It is sent again.", () => send("POST", `v1/deliveries/${encodeURIComponent(item.id)}/retry`), view.refresh) : "")],
          ],
          answer.items || [],
          "No webhook has been sent so far.",
        ),
      );
    },
  };
  return view;
}

export function modelsView(main) {
  const body = h("div", {});
  main.append(h("div", { class: "head" }, h("h1", {}, "Models")), card("Models", h("span", { class: "note" }, "the champion of each kind decides"), body));
  return {
    async refresh() {
      const answer = await get("v1/models");
      body.replaceChildren(
        table(
          [
            ["Kind", (item) => h("b", {}, item.kind)],
            ["Name", (item) => [h("span", { class: "mono" }, item.name || (item.digest || "").slice(0, 12)), " ", chip(item.state === "in use" || item.state === "champion" ? "healthy" : "", item.state), " ", item.simulated ? h("span", { class: "tag-simulated" }, "trained on simulated data") : null]],
            ["Made", (item) => (item.created ? clockTime(item.created, true) : "")],
            ["Measured", (item) => Object.entries(item.metrics || {}).slice(0, 4).map(([name, value]) => `${name.replaceAll("_", " ")} ${Number(value).toPrecision(3)}`).join(" · ")],
            ["Note", (item) => item.error || ""],
          ],
          answer.items || [],
          "No model is loaded: risks come from rules alone.",
        ),
      );
    },
  };
}
