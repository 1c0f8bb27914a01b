"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // How long training takes.
  const form = document.querySelector(".duration");
  if (form) {
    const number = (text) => {
      const match = /^([0-9.]+)([kmbt]?)$/i.exec(text.replace(/[\s,_]/g, ""));
      return match ? parseFloat(match[1]) * { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 }[match[2].toLowerCase()] : NaN;
    };
    const words = (seconds) => {
      for (const [least, size, name] of [[172800, 86400, "days"], [5400, 3600, "hours"], [90, 60, "minutes"], [0, 1, "seconds"]])
        if (seconds >= least) return `${Number((seconds / size).toPrecision(3)).toLocaleString("en")} ${name}`;
      return "\u2013";
    };
    const compute = () => {
      const amount = number(form.amount.value) * number(form.epochs.value);
      form.querySelector("output").textContent = words(amount / Number(form.dataset.rate));
    };
    form.addEventListener("input", compute);
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Copying.
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  for (const button of all("button.copy"))
    button.addEventListener("click", async (event) => {
      event.preventDefault();
      const text = button.closest("details, .command").querySelector("pre").textContent;
      button.textContent = (await copied(text)) ? "copied" : "select and copy";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });

  // What a dot is, and the dots of a picture by the arrow keys.
  const tip = document.getElementById("tip");
  const show = (dot) => say(dot.getAttribute("aria-label"), dot.getBoundingClientRect());
  const say = (words, box) => {
    tip.textContent = words;
    tip.hidden = false;
    const left = Math.min(box.right + 8, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${box.bottom + 8 + tip.offsetHeight > window.innerHeight ? box.top - tip.offsetHeight - 8 : box.bottom + 8}px`;
  };
  let touched = null;
  const hide = () => (tip.hidden = true);
  for (const picture of all("svg")) {
    const dots = all("title", picture).map((title) => {
      const dot = title.parentNode;
      dot.setAttribute("aria-label", title.textContent);
      title.remove();
      dot.addEventListener("mouseenter", () => show(dot));
      dot.addEventListener("mouseleave", hide);
      dot.addEventListener("focus", () => show(dot));
      dot.addEventListener("blur", hide);
      dot.addEventListener("click", (event) => {
        if (!window.matchMedia("(hover: none)").matches || dot === touched) return;
        event.preventDefault(); // a first touch tells, a second one follows
        touched = dot;
        show(dot);
      });
      return dot;
    });
    const links = dots.filter((dot) => dot.hasAttribute("tabindex"));
    links.sort((a, b) => a.getBBox().x - b.getBBox().x);
    links.forEach((link, place) => {
      link.setAttribute("tabindex", place ? "-1" : "0");
      link.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = links[(place + step + links.length) % links.length];
        link.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      });
    });
  }
  // What lives at a moment of a step, by the pointer or the arrow keys.
  for (const figure of all("figure.timeline")) {
    const { kinds, at, gib } = JSON.parse(figure.querySelector("script").textContent);
    const totals = gib.map((sizes) => sizes.reduce((a, b) => a + b));
    for (const picture of all("svg", figure)) {
      const [start, end] = picture.dataset.across.split(" ").map(Number);
      const { width, height } = picture.viewBox.baseVal;
      const line = document.createElementNS(picture.namespaceURI, "line");
      line.setAttribute("class", "cursor");
      let place = totals.indexOf(Math.max(...totals));
      const point = () => {
        const box = picture.getBoundingClientRect();
        const x = start + at[place] * (end - start);
        for (const [name, value] of [["x1", x], ["x2", x], ["y1", 16], ["y2", height - 26]]) line.setAttribute(name, value);
        picture.append(line);
        const parts = kinds.map((kind, index) => [kind, gib[place][index]]).filter(([, size]) => size);
        const words = parts.reverse().map(([kind, size]) => `${kind} ${size}`).join(", ");
        say(`${Math.round(at[place] * 100)} % of the step: ${Number(totals[place].toPrecision(3))} GiB \u2014 ${words}`, {
          right: box.left + (x / width) * box.width, top: box.top, bottom: box.top + 20,
        });
        picture.setAttribute("aria-label", tip.textContent);
      };
      const leave = () => (line.remove(), hide());
      picture.setAttribute("tabindex", "0");
      picture.addEventListener("pointermove", (event) => {
        const box = picture.getBoundingClientRect();
        const share = (((event.clientX - box.left) / box.width) * width - start) / (end - start);
        if (share < 0 || share > 1) return leave();
        place = Math.max(0, at.findLastIndex((when) => when <= share));
        point();
      });
      picture.addEventListener("pointerleave", leave);
      picture.addEventListener("focus", point);
      picture.addEventListener("blur", leave);
      picture.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
        if (!step) return;
        event.preventDefault();
        place = Math.min(at.length - 1, Math.max(0, place + step));
        point();
      });
    }
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", hide, true);

  // The trials that are not drawn, as rows.
  for (const further of all(".further")) {
    const body = further.parentNode.querySelector("tbody");
    further.querySelector("button").addEventListener("click", () => {
      const { words, tiers, outcomes, rows } = JSON.parse(further.querySelector("script").textContent);
      for (const [number, config, tier, outcome, ...figures] of rows) {
        const row = body.insertRow();
        row.id = `trial-${number - 1}`;
        const cell = (text, kind, key) => {
          const made = Object.assign(row.insertCell(), { textContent: text, className: kind });
          made.dataset.key = key;
        };
        const figure = (text) => cell(text, "figure", text === "" ? "1e300" : String(text).replace(/,/g, ""));
        const told = config.map((place) => words[place]).join(", ");
        figure(number);
        cell(told, "config", told);
        cell(tiers[tier], tier, tier);
        cell(outcomes[outcome], "outcome", outcome);
        figures.forEach(figure);
        cell("", "", "");
      }
      further.remove();
    });
  }

  // Sorting.
  for (const table of all("table.sortable")) {
    const body = table.tBodies[0];
    const headers = all("thead th", table);
    headers.forEach((header, column) => {
      const button = header.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = header.getAttribute("aria-sort") === "ascending";
        const key = (row) => row.cells[column].dataset.key;
        const figures = header.classList.contains("figure");
        const order = (a, b) => (figures ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b)));
        const missing = (row) => figures && Number(key(row)) >= 1e300;
        const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || (down ? order(b, a) : order(a, b)));
        headers.forEach((each) => each.removeAttribute("aria-sort"));
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...rows);
      });
    });
  }
})();
