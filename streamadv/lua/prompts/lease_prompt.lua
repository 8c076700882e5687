-- Lease the next prompt of a set to a producer: one that is to be played again, else the next one of the source that is
-- furthest behind its share. While many are left, several of the latter at once.
-- KEYS  void, prompts, prompt_state, prompt_entries, prompt_again
-- ARGV  name, description of the set, 'lease', 'repeat' (the reply to the same call may have been lost) or 'ask' (lease
--       none), nonce of the call, owner, most at once, of how many that are left one is leased at once, then of each
--       source: number of its prompts over all epochs, weight
-- Returns  {'leased', prompt, entry, ...}
--          {'some'}     there is one, and none was asked for
--          {'wait', n}  none is left, and n were begun and have not ended
--          {'over'}     all have ended
--          {'unknown'}  the run has no such set, or another one
-- include prompts
-- include prompt_state
local mode, nonce, owner = ARGV[3], ARGV[4], ARGV[5]
if redis.call('HGET', keys.prompts, ARGV[1]) ~= ARGV[2] then return {'unknown'} end

local leases = {'leased'}
local function lease(item, try, failures)
  local entry = table.concat({whole(try), whole(failures), nonce, owner}, ' ')
  redis.call('HSET', keys.prompt_entries, item, entry)
  leases[#leases + 1], leases[#leases + 2] = item, entry
end

if mode == 'repeat' then
  local flat = redis.call('HGETALL', keys.prompt_entries)
  for i = 1, #flat, 2 do
    if string.match(flat[i + 1], '^%d+ %d+ (%S+)') == nonce then
      leases[#leases + 1], leases[#leases + 2] = flat[i], flat[i + 1]
    end
  end
  if #leases > 1 then return leases end
end

local again = redis.call('ZRANGE', keys.prompt_again, 0, 0)[1]
if again then
  if mode == 'ask' then return {'some'} end
  local try, failures = read_entry(again)
  redis.call('ZREM', keys.prompt_again, again)
  try = try or number_of('base')
  note_try(try)
  lease(again, try, failures or 0)
  return leases
end

local sources, base, unbegun = {}, number_of('base'), 0
for i = 8, #ARGV, 2 do
  local source = #sources + 1
  sources[source] = {next = number_of('next:' .. source), total = tonumber(ARGV[i]), weight = tonumber(ARGV[i + 1])}
  unbegun = unbegun + math.max(0, sources[source].total - sources[source].next)
end
local is_some = false
local count = math.max(1, math.min(tonumber(ARGV[6]), math.floor(unbegun / tonumber(ARGV[7]))))
while #leases < 1 + 2 * count do
  local chosen, least
  for source, it in ipairs(sources) do
    local share = (it.next + 1) / it.weight
    if it.next < it.total and (not least or share < least) then chosen, least = source, share end
  end
  if not chosen then break end
  local it = sources[chosen]
  local item = chosen .. ' ' .. whole(it.next)
  local entry = redis.call('HGET', keys.prompt_entries, item)
  is_some = not entry and mode == 'ask'
  if is_some then break end
  it.next, it.is_begun = it.next + 1, true
  if entry == 'ended' then redis.call('HDEL', keys.prompt_entries, item) end  -- else it was begun before it was set back
  if not entry then lease(item, base, 0) end
end
for source, it in ipairs(sources) do
  if it.is_begun then redis.call('HSET', keys.prompt_state, 'next:' .. source, whole(it.next)) end
end
if is_some then return {'some'} end
if #leases > 1 then
  note_try(base)
  return leases
end
local left = redis.call('HLEN', keys.prompt_entries)
if left > 0 then return {'wait', left} end
return {'over'}
