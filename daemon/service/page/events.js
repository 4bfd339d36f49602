// What happened, newest first.

import { get } from "./api.js";
import { card, chip, h, subjectLink, table } from "./dom.js";
import { clockTime } from "./format.js";

const SEVERITY_LEVEL = { info: "", warning: "watch", error: "warning", critical: "critical" };

export function eventTable(items) {
  return table(
    [
      ["Time", (item) => clockTime(item.time), "nowrap num"],
      ["Device", (item) => subjectLink(item.device || item.node)],
      ["Event", (item) => `${item.kind}${item.code ? ` ${item.code}` : ""}${item.count > 1 ? ` (${item.count} times)` : ""}`, "nowrap"],
      ["Severity", (item) => chip(SEVERITY_LEVEL[item.severity], item.severity)],
      ["What", (item) => [item.message || "", item.action ? h("span", { class: "muted" }, ` Action: ${item.action}`) : null]],
    ],
    items,
    "No events so far.",
  );
}

export function eventsView(main) {
  const filter = { kind: "", node: "" };
  const body = h("div", {});
  const field = (name, text) => {
    const input = h("input", { type: "search", placeholder: "any", autocomplete: "off", size: 14 });
    input.addEventListener("change", () => {
      filter[name] = input.value.trim();
      view.refresh();
    });
    return h("label", {}, text, input);
  };
  main.append(h("div", { class: "head" }, h("h1", {}, "Events")), card("Newest first", null, h("div", { class: "filters" }, field("kind", "Kind"), field("node", "Node")), body));
  const view = {
    async refresh() {
      const answer = await get("v1/events", { ...filter, limit: 200 });
      body.replaceChildren(eventTable(answer.items || []));
    },
  };
  return view;
}
