-- Lease the next prompt of a set to a producer: one that is to be played again, else the next one of the source that is
-- furthest behind its share. While many are left, several of the latter at once.
-- KEYS  void, session, prompts, prompt_state, prompt_entries, prompt_again
-- ARGV  name, description of the set, 'lease', 'repeat' (the reply to the same call may have been lost) or 'ask' (lease
--       none), nonce of the call, owner, most at once, of how many that are left one is leased at once, when shares are
--       selected anew ('' = never, 'begun n' = once so many prompts were begun, 'version n' = once so many batches were
--       trained on), then of each source: number of its prompts over all epochs, weight until others are selected
-- Returns  {'leased', entry of these prompts, prompt, ...}  never begun before
--          {'again', entry, prompt, ...}  begun before, or by this call: their groups may be there already
--          {'select', period}  shares are to be selected for this period first
--          {'some'}     there is one, and none was asked for
--          {'wait', n}  none is left, and n were begun and have not ended
--          {'over'}     all have ended
--          {'unknown'}  the run has no such set, or another one
-- include prompts
-- include prompt_state
local mode, nonce, owner = ARGV[3], ARGV[4], ARGV[5]
if redis.call('HGET', keys.prompts, ARGV[1]) ~= ARGV[2] then return {'unknown'} end

local function entry_of(try, failures) return table.concat({whole(try), whole(failures), nonce, owner}, ' ') end

if mode == 'repeat' then
  local flat, leased = redis.call('HGETALL', keys.prompt_entries), {'again'}
  for i = 1, #flat, 2 do
    if string.match(flat[i + 1], '^%d+ %d+ (%S+)') == nonce then
      leased[2] = flat[i + 1]  -- one call leases under one entry
      leased[#leased + 1] = flat[i]
    end
  end
  if #leased > 1 then return leased end
end

local again = redis.call('ZRANGE', keys.prompt_again, 0, 0)[1]
if again then
  if mode == 'ask' then return {'some'} end
  local try, failures = read_entry(again)
  redis.call('ZREM', keys.prompt_again, again)
  try = try or number_of('base')
  note_try(try)
  local entry = entry_of(try, failures or 0)
  redis.call('HSET', keys.prompt_entries, again, entry)
  return {'again', entry, again}
end

local fields = {'base', 'tries', 'selected'}
for i = 9, #ARGV, 2 do
  local source = (i - 7) / 2
  fields[#fields + 1], fields[#fields + 2], fields[#fields + 3] = 'next:' .. source, 'from:' .. source, 'weight:' .. source
end
local state = redis.call('HMGET', keys.prompt_state, unpack(fields))
local function read(i) return tonumber(state[i] or '') end

local sources, base, begun, unbegun = {}, read(1) or 0, 0, 0
for i = 9, #ARGV, 2 do
  local source = (i - 7) / 2
  local it = {next = read(1 + 3 * source) or 0, from = read(2 + 3 * source) or 0, total = tonumber(ARGV[i]),
    weight = read(3 + 3 * source) or tonumber(ARGV[i + 1])}
  sources[source], begun, unbegun = it, begun + it.next, unbegun + math.max(0, it.total - it.next)
end
local unit, every = string.match(ARGV[8], '^(%l+) (%d+)$')
if unit and mode ~= 'ask' and unbegun > 0 then
  local reached = unit == 'begun' and begun or tonumber(redis.call('HGET', keys.session, 'version') or '') or 0
  local period = math.floor(reached / tonumber(every))
  if period > (read(3) or 0) then return {'select', period} end
end

-- The next prompt of the source that is furthest behind its share since the shares were selected. A source of weight 0
-- comes after all others.
local function next_one()
  local chosen, least
  for source, it in ipairs(sources) do
    if it.next < it.total then
      local share = (it.next - it.from + 1) / it.weight
      if not least or share < least then chosen, least = source, share end
    end
  end
  if not chosen then return nil end
  local it = sources[chosen]
  it.next, it.is_begun = it.next + 1, true
  return chosen, chosen .. ' ' .. whole(it.next - 1)
end

local count, is_some, is_all = math.max(1, math.min(tonumber(ARGV[6]), math.floor(unbegun / tonumber(ARGV[7])))), false, false
local entry, leases, changed = entry_of(base, 0), {}, {}
while not (is_some or is_all) and #leases < count do
  local items = {}
  for _ = 1, mode == 'ask' and 1 or count - #leases do
    local source, item = next_one()
    if not item then
      is_all = true
      break
    end
    items[#items + 1] = item
  end
  local entries = #items > 0 and redis.call('HMGET', keys.prompt_entries, unpack(items)) or {}
  for i, item in ipairs(items) do
    if entries[i] == 'ended' then redis.call('HDEL', keys.prompt_entries, item) end  -- else it was begun before it was set back
    if not entries[i] and mode == 'ask' then
      local it = sources[tonumber(string.match(item, '^%d+'))]
      it.next, is_some = it.next - 1, true
    elseif not entries[i] then
      leases[#leases + 1] = item
      changed[#changed + 1], changed[#changed + 2] = item, entry
    end
  end
end
if #leases > 0 then redis.call('HSET', keys.prompt_entries, unpack(changed)) end
changed = {}
for source, it in ipairs(sources) do
  if it.is_begun then changed[#changed + 1], changed[#changed + 2] = 'next:' .. source, whole(it.next) end
end
if #leases > 0 and base >= (read(2) or 0) then changed[#changed + 1], changed[#changed + 2] = 'tries', whole(base + 1) end
if #changed > 0 then redis.call('HSET', keys.prompt_state, unpack(changed)) end
if is_some then return {'some'} end
if #leases > 0 then return {'leased', entry, unpack(leases)} end
local left = redis.call('HLEN', keys.prompt_entries)
if left > 0 then return {'wait', left} end
return {'over'}
