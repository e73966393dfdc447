"use strict";
(() => {
  const number = (x) => x === null ? "–" : typeof x === "number" ? String(x) : x;
  const data = new Map();
  const numbers = (key) => {
    if (!data.has(key)) data.set(key, JSON.parse(document.getElementById(key + "-data").textContent));
    return data.get(key);
  };
  const show = (text, token) => {
    const key = text.dataset.of, all = [...text.children], place = all.indexOf(token);
    const { head, numbers: rows } = numbers(key);
    const panel = document.getElementById(key + "-panel");
    panel.replaceChildren();
    const add = (name, value) => {
      const item = document.createElement("span"), label = document.createElement("b");
      label.textContent = name + " ";
      item.append(label, value);
      panel.append(item);
    };
    add("token", JSON.stringify(token.textContent) + " at " + place);
    rows[place].forEach((value, i) => { if (value !== null) add(head[i], number(value)); });
  };
  for (const text of document.querySelectorAll("div.text")) {
    const choose = (token) => {
      text.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
      token.setAttribute("tabindex", "0");
      token.focus({ preventScroll: false });
    };
    text.addEventListener("keydown", (event) => {
      const token = event.target.closest(".t");
      if (!token) return;
      const to = {
        ArrowRight: token.nextElementSibling, ArrowLeft: token.previousElementSibling,
        ArrowDown: token.nextElementSibling, ArrowUp: token.previousElementSibling,
        Home: text.firstElementChild, End: text.lastElementChild,
      };
      if (!(event.key in to)) return;
      event.preventDefault();
      if (to[event.key]) choose(to[event.key]);
    });
    text.addEventListener("focusin", (event) => { const token = event.target.closest(".t"); if (token) show(text, token); });
    text.addEventListener("mouseover", (event) => { const token = event.target.closest(".t"); if (token) show(text, token); });
    text.addEventListener("click", (event) => { const token = event.target.closest(".t"); if (token) choose(token); });
  }
})();
