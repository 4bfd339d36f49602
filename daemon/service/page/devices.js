// Devices: the list, one device with its reasons and history, one node.

import { get } from "./api.js";
import { lineChart, lineKeys } from "./charts.js";
import { card, chip, deviceLink, empty, h, nodeLink, simulatedTag, table } from "./dom.js";
import { eventTable } from "./events.js";
import { ago, clockTime, horizonName, metricName, metricValue, percent, riskText, seconds } from "./format.js";

export function devicesView(main) {
  const filter = { kind: "", min_risk: "" };
  const body = h("div", {});
  const select = (name, text, choices) => {
    const box = h("select", {}, choices.map(([value, label]) => h("option", { value }, label)));
    box.addEventListener("change", () => {
      filter[name] = box.value;
      view.refresh();
    });
    return h("label", {}, text, box);
  };
  main.append(
    h("div", { class: "head" }, h("h1", {}, "Devices")),
    card(
      "By risk",
      null,
      h("div", { class: "filters" }, select("kind", "Kind", [["", "all"], ["gpu", "GPUs"], ["disk", "disks"], ["node", "hosts"]]), select("min_risk", "Risk", [["", "any"], ["0.05", "5 % or more"], ["0.2", "20 % or more"], ["0.5", "50 % or more"]])),
      body,
    ),
  );
  const view = {
    async refresh() {
      const answer = await get("v1/risk", { ...filter, limit: 200 });
      body.replaceChildren(
        table(
          [
            ["Device", (item) => [deviceLink(item.device), " ", simulatedTag(item)]],
            ["Model", (item) => item.model || ""],
            ["Level", (item) => chip(item.level)],
            ["Risk", (item) => Object.entries(item.risk || {}).map(([horizon, p]) => `${percent(p)} in ${horizonName(horizon)}`).join(" · ") || percent(item.max_risk), "num"],
            ["Reason", (item) => item.reason || ""],
          ],
          answer.items || [],
          "No device matches.",
        ),
        answer.next ? h("p", { class: "empty" }, "The 200 most at risk are shown.") : "",
      );
    },
  };
  return view;
}

export function deviceView(main, id) {
  const node = id.split("/")[0];
  const title = h("h1", { class: "mono" }, id);
  const tags = h("span", {});
  const body = h("div", { class: "stack" });
  main.append(h("div", { class: "head" }, h("div", { class: "crumbs" }, h("a", { href: "#/" }, "Fleet"), " / ", nodeLink(node)), title, tags), body);
  return {
    async refresh() {
      const device = await get(`v1/risk/${encodeURIComponent(id).replaceAll("%2F", "/")}`);
      tags.replaceChildren(chip(device.level), " ", simulatedTag(device) || "");
      const items = device.events || [];
      body.replaceChildren(
        h("div", { class: "half" }, riskCard(device), reasonsCard(device)),
        historyCard(device, items),
        metricsCard(device, items),
        card("Events of this device", null, eventTable(items)),
      );
    },
  };
}

function riskCard(device) {
  const risk = Object.entries(device.risk || {}).sort(([a], [b]) => a - b);
  return card(
    "Chance of failure",
    h("span", { class: "note" }, "calibrated, within the time named"),
    h(
      "div",
      { class: "body stack" },
      risk.length
        ? h("div", { class: "horizons" }, risk.map(([horizon, p]) => h("div", { class: "horizon" }, h("span", { class: "muted" }, horizonName(horizon)), h("b", {}, percent(p)), meter(p, device.level))))
        : h("p", { class: "muted" }, "No risk is known for this device yet."),
      h(
        "dl",
        { class: "facts" },
        [
          ["Kind", device.kind],
          ["Model", device.model],
          ["Serial", device.serial],
          ["Last reading", lastReading(device)],
        ]
          .filter(([, value]) => value)
          .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
      ),
    ),
  );
}

function lastReading(device) {
  const times = Object.values(device.latest || {}).map((found) => seconds(found.time));
  return times.length ? ago(Math.max(...times)) : "none held";
}

function meter(p, level) {
  const bar = h("i", { "data-level": level });
  bar.style.setProperty("width", `${Math.max(1, Math.min(100, p * 100))}%`);
  return h("div", { class: "meter", "aria-hidden": "true" }, bar);
}

function reasonsCard(device) {
  const reasons = device.reasons || [];
  const line = (item) => {
    const rule = item.contribution === null;
    const since = seconds(item.since);
    return h(
      "li",
      { class: "reason" },
      h("span", {}, item.text),
      rule ? h("span", { class: "rule", title: "A rule for what is known to be fatal or nearly so" }, "rule") : h("span", { class: "muted num nowrap", title: "Contribution in log odds" }, Number.isFinite(item.contribution) ? `${item.contribution > 0 ? "+" : ""}${item.contribution.toFixed(2)}` : ""),
      since ? h("small", {}, `since ${clockTime(since)} (${ago(since)})`) : null,
    );
  };
  return card("Why", h("span", { class: "note" }, "strongest first; numbers are log odds"), reasons.length ? h("ul", { class: "list" }, reasons.map(line)) : empty("Nothing raises this device's risk above its usual."));
}

function historyCard(device, events) {
  // The service keeps a point a minute; the risk shown above is the newest.
  const kept = device.history || [];
  const history = device.risk && Object.keys(device.risk).length ? [...kept, { time: Date.now() / 1000, risk: device.risk }] : kept;
  const horizons = Object.keys(device.risk || {}).sort((a, b) => a - b);
  const lines = horizons.map((horizon) => ({ name: horizonName(horizon), points: history.map((row) => [seconds(row.time), valueOf(row, horizon)]) }));
  const marks = events.filter((event) => event.severity === "critical").map((event) => seconds(event.time));
  if (!history.length) return card("Risk over time", null, empty("No history yet: it grows by a point a minute."));
  return card("Risk over time", h("span", { class: "note" }, "a point a minute; red marks: critical events"), h("div", { class: "body" }, lineKeys(lines.map((line) => line.name)), lineChart(lines, { name: "Chance of failure", show: percent, low: 0, high: 1, width: document.getElementById("main").clientWidth - 75, height: 170, marks })));
}

function valueOf(row, horizon) {
  const risk = row.risk || {};
  const value = risk[horizon];
  return value === undefined || value === null ? null : value;
}

const FIRST = ["gpu_ecc_dram_corrected_total", "gpu_ecc_dram_uncorrected_total", "gpu_row_remap_corrected_total", "gpu_temperature_celsius", "gpu_memory_temperature_celsius", "gpu_power_watts", "gpu_sm_clock_hertz", "gpu_pcie_replay_total"];

function metricsCard(device, events) {
  const series = new Map((device.series || []).map((line) => [line.metric, line]));
  const latest = device.latest || {};
  const names = [...series.keys()];
  const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  names.sort((a, b) => order(a) - order(b) || a.localeCompare(b));
  const marks = events.filter((event) => event.severity === "critical").map((event) => seconds(event.time));
  const charts = names.map((name) => lineChart([{ name, points: pointsOf(series.get(name)) }], { name: metricName(name) + (name.endsWith("_total") ? ", per hour" : ""), show: (value) => metricValue(name, value), marks }));
  const rest = Object.keys(latest)
    .filter((name) => !names.includes(name))
    .sort();
  if (!charts.length && !rest.length) return card("Readings", null, empty("No readings are held for this device."));
  return card(
    "Readings",
    null,
    charts.length ? h("div", { class: "body charts" }, charts) : null,
    rest.length
      ? table(
          [
            ["Reading", (name) => metricName(name)],
            ["Value", (name) => metricValue(name, latest[name].value), "num"],
            ["Metric", (name) => h("code", { class: "muted" }, name)],
          ],
          rest,
          "",
        )
      : null,
  );
}

function pointsOf(line) {
  return line.times.map((time, index) => [seconds(time), line.values[index]]);
}

export function nodeView(main, id) {
  const tags = h("span", {});
  const body = h("div", { class: "stack" });
  main.append(h("div", { class: "head" }, h("div", { class: "crumbs" }, h("a", { href: "#/" }, "Fleet")), h("h1", { class: "mono" }, id), tags), body);
  return {
    async refresh() {
      const node = await get(`v1/nodes/${encodeURIComponent(id)}`);
      const items = (node.risks || []).sort((a, b) => a.device.localeCompare(b.device, "en", { numeric: true }));
      tags.replaceChildren(chip(node.level), " ", simulatedTag(node) || "", " ", h("span", { class: "muted" }, `last heard ${ago(node.last_seen)}`));
      body.replaceChildren(
        card(
          "Devices",
          h("span", { class: "note" }, `${items.length}`),
          h("div", { class: "body tiles" }, items.length ? items.map(tile) : h("p", { class: "muted" }, "No device of this node has a risk yet.")),
        ),
        factsCard(node),
        card("Events of this node", null, eventTable(node.events || [])),
      );
    },
  };
}

function tile(item) {
  return h(
    "a",
    { class: "tile", href: `#/device/${encodeURIComponent(item.device)}`, "data-level": item.level },
    h("div", {}, h("span", { class: "mono" }, item.device.split("/")[1] || "host"), h("b", {}, riskText(item))),
    h("small", {}, item.model || item.kind),
    item.reason ? h("small", {}, item.reason) : null,
  );
}

function factsCard(node) {
  const skip = ["node", "devices", "level", "max_risk", "simulated"];
  const facts = Object.entries(node).filter(([name, value]) => !skip.includes(name) && value !== null && value !== "" && typeof value !== "object");
  if (!facts.length) return null;
  const show = (name, value) => {
    if (name.endsWith("_seconds")) return `${value.toFixed(2)} s`;
    return seconds(value) !== null && /seen|first|since|created|time/.test(name) ? clockTime(value, true) : String(value);
  };
  return card("About", null, h("div", { class: "body" }, h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(name, value))]))));
}
