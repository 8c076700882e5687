-- How a group ends whose members have to be looked at one by one.
-- A packet that the grouper has taken is a field of the group's hash: its payload key ->
--   '<bytes> <fencing epoch> <mask>\n<members>\n<member table>'
-- members: see lib/members. mask: '1' for each member that counts for the group, else '0'. What `producer.score` brought
-- is in the fields 'score:<slot>' (JSON) and 'score_value:<slot>' (the reward, or 'x' = unscorable).
-- KEYS  open, groups, ended, ended_before, ledger, garbage, sizes, evals, kept, trainer, prompt_ends
-- include members
-- include evaluation
-- include keep
local function packet_field(packet)
  return packet.bytes .. ' ' .. packet.epoch .. ' ' .. mask_of(packet) .. '\n' .. packet.text .. '\n' .. packet.table
end

local function packet_of(key, field)
  local bytes, epoch, mask, text, at = string.match(field, '^(%d+) (%d+) ([01]+)\n(.-\n)\n()')
  local members = text and members_of(text)
  if not members or #members ~= #mask then return nil end
  for i, member in ipairs(members) do member.counts = string.sub(mask, i, i) == '1' end
  return {key = key, bytes = bytes, epoch = epoch, text = text, table = string.sub(field, at), members = members}
end

-- Whether enough usable members are there, or nothing more can come.
local function is_full(group)
  return group.usable >= group.size or group.usable + group.unusable >= #group.slots
end

-- Whether a group ends.
local function is_complete(group) return is_full(group) and not lacks_columns(group) end

-- Count the slots of a group that may end. Its hash has to be read once more if it has packets.
local function count_slots(group)
  group.usable, group.unusable = slots_with(group, 'u'), slots_with(group, 'x')
  group.has_fields = string.find(group.slots, '[us]') ~= nil
end

-- What a group short of usable members becomes.
local function short_outcome(usable, policy, otherwise)
  local minimum = tonumber(policy.partial_min_usable)
  if minimum and usable >= minimum then return 'partial' end
  return otherwise
end

-- Why a group with these rewards is not trained on, or nil.
local function filter_reason(rewards, policy)
  if #rewards == 0 then return 'no_train_members' end
  local low, high, sum = rewards[1], rewards[1], 0
  for _, reward in ipairs(rewards) do
    low, high, sum = math.min(low, reward), math.max(high, reward), sum + reward
  end
  if policy.zero_variance == '1' and low == high then return 'zero_variance' end
  local mean = sum / #rewards
  local easy, hard = tonumber(policy.difficulty_high), tonumber(policy.difficulty_low)
  if (easy and mean >= easy) or (hard and mean <= hard) then return 'difficulty' end
  return nil
end

-- Read the hash of the group: its packets, which are added to those of this call, and its other fields. Turns, which may
-- be many bytes, go before.
local function load_packets(group)
-- include turns
  for at = 1, group.turned and #(group.slots or '') or 0 do
    if string.sub(group.slots, at, at) == '.' then drop_turns(group, at - 1) end
  end
  local flat = redis.pcall('HGETALL', group.hash)
  for i = 1, flat.err and 0 or #flat, 2 do
    local packet = is_payload(flat[i]) and packet_of(flat[i], flat[i + 1])
    if packet then table.insert(group.packets, packet) else group.fields[flat[i]] = flat[i + 1] end
  end
end

-- The letter of a slot. The slot map of a broken group may be unreadable: then its members are all there is.
local function letter_of(group, index)
  return group.slots and string.sub(group.slots, index + 1, index + 1) or 'u'
end

-- The reward of a member that counts. Of one that came without, `producer.score` has brought it.
local function reward_of(group, member)
  if member.reward ~= '-' then return tonumber(member.reward) end
  local score = group.fields['score:' .. member.index]
  if score then table.insert(group.scores, '"' .. member.index .. '":' .. score) end
  if group.role == 'eval' then return score and reward_in(score) end  -- no filter judges it
  return tonumber(group.fields['score_value:' .. member.index] or '')
end

-- Judge the members of the group's packets: how many have a reward, how many have none yet, and the rewards of those that
-- are no baselines. From here on only those with a reward count.
local function judge_members(group)
  local scored, unscored, rewards = 0, 0, {}
  for _, packet in ipairs(group.packets) do
    packet.scored = 0
    for _, member in ipairs(packet.members) do
      local letter = member.counts and letter_of(group, member.index)
      member.counts = letter == 'u'
      if letter == 'u' then
        packet.scored = packet.scored + 1
        local reward = reward_of(group, member)
        if member.role ~= 'baseline' then rewards[#rewards + 1] = reward end
      elseif letter == 's' then
        unscored = unscored + 1
      end
    end
    scored = scored + packet.scored
  end
  return scored, unscored, rewards
end

-- Keep a group that is not trained on, or delete its packets.
local function keep_or_discard(group, outcome, members)
  local packets, more, kind = {}, {}, group.role == 'eval' and 'eval' or 'dropped'
  for _, packet in ipairs(group.packets) do
    if packet.bytes ~= '0' then packets[#packets + 1] = packet end
  end
  local kept
  if #packets > 0 and outcome ~= 'malformed' and is_chosen(kind, group.id) then
    local round = kind == 'eval' and round_of(group)
    if round then more = {'round', round} end
    kept = keep(kind, outcome, entry_of(group, packets, outcome, members), more)
  end
  if kept then
    if group.columns_key ~= '' then group.columns_key = nil end
    return count('live_bytes', -kept)
  end
  for _, packet in ipairs(packets) do discard(packet) end
end

-- End the group for `outcome`. 'complete' and 'partial' go to the groups log unless a filter drops them; any other outcome
-- drops the members under its name. However an evaluation group ends, its members are dropped as 'eval'. `letter` is the first one of the tombstone. Returns the outcome counted, the
-- group's data source, and the rewards of its members that are no baselines, separated by blanks.
local function end_group(group, outcome, letter, policy)
  if group.has_fields then load_packets(group) end
  local scored, unscored, rewards = judge_members(group)
  if group.role == 'eval' and outcome ~= 'malformed' then
    note_evaluation(group, rewards)
    outcome = 'eval'
  elseif outcome == 'complete' or outcome == 'partial' then
    outcome = filter_reason(rewards, policy) or outcome
  end
  if outcome == 'complete' or outcome == 'partial' then
    log_group(group, outcome, scored)
    count('dropped:surplus', unscored)
  else
    count((outcome == 'malformed' and 'dead:' or 'dropped:') .. outcome, scored + unscored)
    keep_or_discard(group, outcome, scored + unscored)
  end
  count('open', -scored - unscored)
  return close_group(group, outcome, letter, policy, table.concat(rewards, ' '))
end

-- End a group that is complete. Returns what end_group returns.
local function complete(group, policy)
  local outcome = group.usable >= group.size and 'complete' or short_outcome(group.usable, policy, 'incomplete')
  return end_group(group, outcome, 'c', policy)
end
