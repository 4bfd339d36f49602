// Elements without markup strings: what the service sends is always text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(4).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function notice(text) {
  const box = document.getElementById("notice");
  box.textContent = text;
  box.setAttribute("data-shown", "");
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => box.removeAttribute("data-shown"), 6000);
}

export function chip(level, text) {
  return h("span", { class: "chip", "data-level": level }, text || level || "unknown");
}

export function simulatedTag(item) {
  return item && item.simulated ? h("span", { class: "tag-simulated" }, "simulated") : null;
}

export function deviceLink(id) {
  return h("a", { href: `#/device/${encodeURIComponent(id)}`, class: "mono" }, id);
}

export function nodeLink(id) {
  return h("a", { href: `#/node/${encodeURIComponent(id)}`, class: "mono" }, id);
}

export function subjectLink(id) {
  if (!id) return "";
  return id.includes("/") ? deviceLink(id) : nodeLink(id);
}

export function card(title, note, ...content) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, title), note), content);
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

// A table that turns into cards on a phone. Columns: [title, cell(item), class].
export function table(columns, items, none) {
  if (!items.length) return empty(none);
  return h(
    "div",
    { class: "table" },
    h(
      "table",
      { class: "cards" },
      h("thead", {}, h("tr", {}, columns.map(([title, , style]) => h("th", { scope: "col", class: style }, title)))),
      h("tbody", {}, items.map((item) => h("tr", {}, columns.map(([title, cell, style]) => h("td", { "data-name": title, class: style }, h("div", {}, cell(item))))))),
    ),
  );
}
