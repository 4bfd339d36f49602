// The overview: how many, how bad, where, and what is being done about it.

import { get, getAll } from "./api.js";
import { card, chip, deviceLink, empty, h, simulatedTag } from "./dom.js";
import { ago, rank, riskText } from "./format.js";
import { Heatmap, legend } from "./heatmap.js";
import { eventTable } from "./events.js";
import { protectionItem } from "./jobs.js";

const MOST_DEVICES = 200000;
const FULL_RELOAD_MS = { small: 2000, large: 30000 };
const LARGE = 5000;

export function fleetView(main) {
  const heat = new Heatmap((device) => {
    location.hash = `#/device/${encodeURIComponent(device)}`;
  });
  const stats = h("dl", { class: "stats" });
  const risky = h("div", {});
  const protections = h("div", {});
  const events = h("div", {});
  const late = card("Latest events", h("span", { class: "end" }, h("a", { href: "#/events" }, "All events")), events);
  late.classList.add("late");
  const heatNote = h("span", { class: "note" });
  main.append(
    h("div", { class: "head" }, h("h1", {}, "Fleet")),
    stats,
    h(
      "div",
      { class: "split" },
      h(
        "div",
        { class: "stack" },
        h("section", { class: "card", "aria-label": "Heat map" }, h("header", {}, h("h2", {}, "Risk by device"), heatNote, h("span", { class: "end" }, legend())), heat.box, heat.info),
        late,
      ),
      h("div", { class: "stack" }, card("Needs attention", h("span", { class: "end" }, h("a", { href: "#/devices" }, "All devices")), risky), card("Protections", h("span", { class: "end" }, h("a", { href: "#/jobs" }, "Jobs and protections")), protections)),
    ),
  );
  let devices = [];
  let loadedAt = 0;
  let loading = false;

  async function loadHeat() {
    const wait = devices.length > LARGE ? FULL_RELOAD_MS.large : FULL_RELOAD_MS.small;
    if (loading || Date.now() - loadedAt < wait - 500) return;
    loading = true;
    try {
      const first = devices.length === 0;
      let shown = 0;
      const progress = (items) => {
        // Show what is there, but not after every page: sorting again and again costs more than the wait.
        if (items.length >= 2 * shown) {
          shown = items.length;
          heat.show(items);
        }
      };
      devices = await getAll("v1/risk", {}, MOST_DEVICES, first ? progress : null);
      heat.show(devices);
      loadedAt = Date.now();
    } finally {
      loading = false;
    }
  }

  return {
    close: () => heat.close(),
    async refresh() {
      const [nodes, open, latest] = await Promise.all([getAll("v1/nodes", {}, MOST_DEVICES), get("v1/protections", { limit: 5 }), get("v1/events", { limit: 8 }), loadHeat()]);
      const simulated = devices.filter((item) => item.simulated).length;
      const attention = devices.filter((item) => rank(item.level) > 0).sort((a, b) => rank(b.level) - rank(a.level) || b.max_risk - a.max_risk);
      const worst = attention.length ? attention[0].level : "healthy";
      const silent = nodes.filter((node) => node.last_seen && Date.now() - Date.parse(node.last_seen) > 180000).length;
      const openOnes = (open.items || []).filter((item) => item.state === "open" || item.state === "accepted");
      heatNote.textContent = simulated && simulated === devices.length ? "all simulated" : "";
      stats.replaceChildren(
        stat("Nodes", nodes.length, silent ? `${silent} silent for 3 min` : "all reporting", silent ? "warning" : ""),
        stat("Devices", devices.length, simulated ? `${simulated.toLocaleString("en")} simulated, ${(devices.length - simulated).toLocaleString("en")} of real hosts` : "none simulated"),
        stat("At risk", attention.length, attention.length ? `worst: ${riskText(attention[0])}` : "none above watch", worst),
        stat("Open protections", openOnes.length, open.items && open.items.length ? `last ${ago(open.items[0].created)}` : "none so far"),
      );
      risky.replaceChildren(attention.length ? h("ul", { class: "list" }, attention.slice(0, 6).map(riskyItem)) : empty(devices.length ? "No device is above watch." : "No device has reported yet."));
      const shown = (open.items || []).slice(0, 2);
      protections.replaceChildren(shown.length ? h("ul", { class: "list" }, shown.map((item) => protectionItem(item, true))) : empty("No protection so far. One is made when what a job would lose exceeds what a save costs."));
      events.replaceChildren(eventTable(latest.items || []));
    },
  };
}

function stat(name, value, note, level) {
  return h("div", { class: "card stat", "data-level": level }, h("dt", {}, name), h("dd", {}, value.toLocaleString("en"), h("small", {}, note)));
}

export function riskyItem(item) {
  return h(
    "li",
    { class: "risky" },
    h("span", { class: "bar", "data-level": item.level }),
    h("span", {}, deviceLink(item.device), " ", simulatedTag(item)),
    h("span", { class: "nowrap" }, chip(item.level), " ", h("span", { class: "percent" }, riskText(item))),
    h("span", { class: "why" }, item.reason || "No single reason stands out yet."),
  );
}
